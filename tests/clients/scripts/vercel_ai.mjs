// Vercel's AI SDK, by its provider for OpenAI-compatible servers.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const provider = createOpenAICompatible({
  name: "ringserve",
  baseURL: `${process.env.RINGSERVE_URL}/v1`,
  apiKey: "none",
  supportsStructuredOutputs: true,
});
const settings = {
  model: provider(process.env.RINGSERVE_MODEL), temperature: 0, maxOutputTokens: 60, maxRetries: 0,
};
const prompt = "What is the capital of France? Answer in one word.";

async function check(name, run) {
  let result = "yes";
  try {
    await run();
  } catch (error) {
    console.error(error);
    result = String(error).slice(0, 300);
  }
  console.log(JSON.stringify({ check: name, result }));
}

function expect(condition, what = "") {
  if (!condition) throw new Error(`unexpected: ${JSON.stringify(what)}`);
}

async function chat() {
  const { text } = await generateText({ ...settings, prompt });
  expect(text.includes("Paris"), text);
}

await check("chat", chat);
await check("stream", async () => {
  let text = "";
  for await (const piece of streamText({ ...settings, prompt }).textStream) text += piece;
  expect(text.includes("Paris"), text);
});
await check("second turn", async () => {
  const { response } = await generateText({ ...settings, prompt });
  const messages = [{ role: "user", content: prompt }, ...response.messages, { role: "user", content: "And of Italy?" }];
  const { text } = await generateText({ ...settings, messages });
  expect(text.length > 0, text);
});
await check("tools", async () => {
  const add = tool({
    description: "Add two numbers.",
    inputSchema: z.object({ a: z.number(), b: z.number() }),
    execute: async ({ a, b }) => a + b,
  });
  const { toolCalls } = await generateText({
    ...settings, maxOutputTokens: 200, prompt: "Add 2 and 3.", tools: { add }, toolChoice: "required",
    stopWhen: stepCountIs(1),
  });
  expect(toolCalls[0].toolName === "add", toolCalls);
});
await check("structured", async () => {
  const schema = z.object({ name: z.string().max(20), is_capital: z.boolean() });
  const { object } = await generateObject({ ...settings, maxOutputTokens: 200, schema, prompt });
  expect(typeof object.name === "string", object);
});
await check("long prompt", async () => {
  try {
    await generateText({ ...settings, prompt: "word ".repeat(9000) });
  } catch (error) {
    expect(String(error).includes("maximum context length"), String(error));
    return;
  }
  throw new Error("a prompt that is too long was answered");
});
await check("pause", async () => {
  await chat();
  await new Promise((resolve) => setTimeout(resolve, 20_000));
  await chat();
});
