// The npm client against a served model: prints what it saw as one JSON object.
import OpenAI from "openai";

const client = new OpenAI({ baseURL: process.env.BASE_URL, apiKey: "none", maxRetries: 0 });
const model = (await client.models.list()).data[0].id;
const messages = [{ role: "user", content: "Say a word." }];
const common = { model, temperature: 0, max_tokens: 16 };

const whole = await client.chat.completions.create({ ...common, messages, logprobs: true, top_logprobs: 2 });
let streamed = "";
let usage = null;
const stream = await client.chat.completions.create({
  ...common,
  messages,
  stream: true,
  stream_options: { include_usage: true },
});
for await (const chunk of stream) {
  streamed += chunk.choices[0]?.delta?.content ?? "";
  usage = chunk.usage ?? usage;
}
const echoed = await client.completions.create({ ...common, prompt: ["one", "two"], echo: true, logprobs: 1, n: 2 });
const place = await client.chat.completions.create({
  ...common,
  max_tokens: 200,
  messages,
  response_format: {
    type: "json_schema",
    json_schema: { name: "place", schema: { type: "object", properties: { big: { type: "boolean" } }, required: ["big"], additionalProperties: false } },
  },
});
const errors = [];
for (const body of [{ model: "nobody", messages }, { ...common, messages: [] }, { ...common, messages, temperature: 9 }]) {
  try {
    await client.chat.completions.create(body);
  } catch (error) {
    errors.push([error.constructor.name, error.status, error.code]);
  }
}
const controller = new AbortController();
let aborted = false;
try {
  const long = await client.completions.create({ ...common, prompt: "x", max_tokens: 200, stream: true }, { signal: controller.signal });
  for await (const chunk of long) controller.abort();
} catch (error) {
  aborted = true;
}
console.log(
  JSON.stringify({
    model,
    whole: whole.choices[0].message.content,
    entries: whole.choices[0].logprobs.content.length,
    usage: whole.usage,
    streamed,
    streamedUsage: usage,
    texts: echoed.choices.map((choice) => choice.text),
    firstScore: echoed.choices[0].logprobs.token_logprobs[0],
    place: place.choices[0].message.content,
    errors,
    aborted,
  }),
);
