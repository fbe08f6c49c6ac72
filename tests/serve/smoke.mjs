// Smoke test with the `openai` package of npm: node smoke.mjs http://127.0.0.1:8000/v1 model
// Prints one JSON document; any failure is an exception and a non-zero exit.

import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const [, , baseURL, model] = process.argv;
const entryPoint = createRequire(`${process.env.NODE_PATH ?? process.cwd()}/`).resolve("openai");
const { OpenAI } = await import(pathToFileURL(entryPoint));
const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });

const params = { model, messages: [{ role: "user", content: "hi" }], max_tokens: 8, temperature: 0 };
const whole = await client.chat.completions.create(params);
let streamed = "";
let usage = null;
for await (const chunk of await client.chat.completions.create({
  ...params, stream: true, stream_options: { include_usage: true },
})) {
  streamed += chunk.choices[0]?.delta?.content ?? "";
  usage = chunk.usage ?? usage;
}
const models = await client.models.list();
let refused = null;
try {
  await client.chat.completions.create({ ...params, temperature: 9 });
} catch (error) {
  refused = error.status;
}
console.log(JSON.stringify({
  whole: whole.choices[0].message.content, streamed, usage, models: models.data.map((each) => each.id), refused,
}));
