// OpenAI's client for Node.
import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";

const model = process.env.RINGSERVE_MODEL;
const client = new OpenAI({ baseURL: `${process.env.RINGSERVE_URL}/v1`, apiKey: "none", maxRetries: 0 });
const asked = [{ role: "user", content: "What is the capital of France? Answer in one word." }];
const tools = [{
  type: "function",
  function: {
    name: "add",
    parameters: {
      type: "object",
      properties: { a: { type: "integer" }, b: { type: "integer" } },
      required: ["a", "b"],
    },
  },
}];

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
  const answer = await client.chat.completions.create({ model, messages: asked, temperature: 0, max_tokens: 20 });
  expect(answer.choices[0].message.content.includes("Paris"), answer);
  return answer.choices[0].message;
}

await check("chat", chat);
await check("stream", async () => {
  const runner = client.chat.completions.stream({ model, messages: asked, temperature: 0, max_tokens: 20 });
  const text = await runner.finalContent();
  expect(text.includes("Paris"), text);
});
await check("second turn", async () => {
  const messages = [...asked, await chat(), { role: "user", content: "And of Italy?" }];
  const answer = await client.chat.completions.create({ model, messages, max_tokens: 20 });
  expect(answer.usage.completion_tokens > 0, answer);
});
await check("tools", async () => {
  const messages = [{ role: "user", content: "Add 2 and 3." }];
  const first = await client.chat.completions.create({
    model, messages, tools, tool_choice: "required", parallel_tool_calls: false,
  });
  const message = first.choices[0].message;
  expect(message.tool_calls[0].function.name === "add", first);
  messages.push(message, { role: "tool", tool_call_id: message.tool_calls[0].id, content: "5" });
  expect((await client.chat.completions.create({ model, messages, tools, max_tokens: 20 })).choices.length);
});
await check("structured", async () => {
  const City = z.object({ name: z.string().max(20), is_capital: z.boolean() });
  const answer = await client.chat.completions.parse({
    model, messages: asked, response_format: zodResponseFormat(City, "city"), max_tokens: 200, temperature: 0,
  });
  expect(typeof answer.choices[0].message.parsed.name === "string", answer);
});
await check("long prompt", async () => {
  try {
    await client.chat.completions.create({ model, messages: [{ role: "user", content: "word ".repeat(9000) }] });
  } catch (error) {
    expect(error.code === "context_length_exceeded", String(error));
    return;
  }
  throw new Error("a prompt that is too long was answered");
});
await check("pause", async () => {
  await chat();
  await new Promise((resolve) => setTimeout(resolve, 20_000));
  await chat();
});
