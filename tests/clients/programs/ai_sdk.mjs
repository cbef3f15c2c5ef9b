// The AI SDK. Words: responses, stored (responses with its default: items by reference), chat, anthropic or
// compatible; stream.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const words = process.argv.slice(2);
const baseURL = process.env.OPENAI_BASE_URL; // Anthropic's provider wants the /v1 as well
const system = "You add numbers. Be brief.";
const prompt = "Add 2 and 3. Then add 10.0 to the sum, and 1 to 2. é✓";

function model() {
  if (words.includes("anthropic")) return createAnthropic({ baseURL, apiKey: "none" })("a-model");
  if (words.includes("compatible")) return createOpenAICompatible({ name: "rollbook", baseURL })("a-model");
  const openai = createOpenAI({ baseURL, apiKey: "none" });
  return words.includes("chat") ? openai.chat("a-model") : openai("a-model");
}

const options = {
  model: model(),
  system,
  prompt,
  stopWhen: stepCountIs(6),
  tools: {
    add: tool({
      description: "Add two numbers.",
      inputSchema: z.object({ a: z.number(), b: z.number() }),
      execute: async ({ a, b }) => String(a + b),
    }),
  },
};
if (words.includes("responses")) options.providerOptions = { openai: { store: false } };

async function steps() {
  if (!words.includes("stream")) return (await generateText(options)).steps;
  const result = streamText(options);
  await result.consumeStream();
  return await result.steps;
}

const shown = (await steps()).map((step) => ({
  content: step.text,
  reasoning: step.reasoningText ?? "",
  calls: step.toolCalls.map((call) => ({ id: call.toolCallId, name: call.toolName, arguments: call.input })),
  finish: step.finishReason,
  usage: [step.usage.inputTokens, step.usage.outputTokens],
}));
console.log("\n" + JSON.stringify({ answer: shown.at(-1).content, turns: shown }));
