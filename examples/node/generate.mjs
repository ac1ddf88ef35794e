// gRPC from Node: one streamed turn. The stubs are made from the contract at run time.
import { fileURLToPath } from "node:url";
import grpc from "@grpc/grpc-js";
import protoLoader from "@grpc/proto-loader";

const target = process.argv[2] ?? "127.0.0.1:50051";
const protos = fileURLToPath(new URL("../../proto", import.meta.url));
const definition = protoLoader.loadSync("ringserve/v1/inference.proto", {
  includeDirs: [protos],
  defaults: true,
  keepCase: true,
  longs: Number,
  enums: String,
  oneofs: true,
});
const { Inference } = grpc.loadPackageDefinition(definition).ringserve.v1;
const client = new Inference(target, grpc.credentials.createInsecure());
const metadata = new grpc.Metadata();
if (process.env.RINGSERVE_TOKEN) metadata.set("authorization", `Bearer ${process.env.RINGSERVE_TOKEN}`);

const request = { text: "Once upon a time", sampling_params: { max_tokens: 32 } };
const call = client.Generate(request, metadata, { deadline: Date.now() + 60_000 });
call.on("data", ({ response, start, chunk, complete }) => {
  if (response === "start") console.log(`${start.plan.algorithm} because ${start.plan.reason}`);
  if (response === "chunk") process.stdout.write(chunk.text);
  if (response === "complete") console.log(`\n${complete.finish_reason}, ${complete.usage.completion_tokens} tokens`);
});
call.on("error", (error) => {
  console.error(`${grpc.status[error.code]}: ${error.details}`);
  process.exitCode = 1;
  client.close();
});
call.on("end", () => client.close());
