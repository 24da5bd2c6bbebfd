// AI SDK: text, streams, tools and objects by its providers for OpenAI, compatible services and Anthropic.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, NoObjectGeneratedError, NoOutputGeneratedError, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const url = process.argv[2];
const key = { apiKey: "none" };
const openai = createOpenAI({ baseURL: `${url}/v1`, ...key });
const models = {
  "OpenAI, Responses": openai.responses("bundled"),
  "OpenAI, chat": openai.chat("bundled"),
  compatible: createOpenAICompatible({
    name: "tessera", baseURL: `${url}/v1`, supportsStructuredOutputs: true, includeUsage: true, ...key,
  })("bundled"),
  Anthropic: createAnthropic({ baseURL: `${url}/v1`, ...key })("bundled"),
};
const weather = tool({
  description: "Return the weather of a city.",
  inputSchema: z.object({ city: z.string(), days: z.int().min(1).max(7).optional() }),
  execute: async ({ city }) => `${city}: 20 degrees`,
});
const answer = Output.object({ schema: z.object({ city: z.string().max(20), degrees: z.int() }) });
const common = { prompt: "How warm is Rome?", maxOutputTokens: 120, temperature: 0, maxRetries: 0 };
// The first step calls the tool, the second one answers.
const prepareStep = ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? "required" : "auto" });
const providerOptions = { openai: { parallelToolCalls: false }, anthropic: { disableParallelToolUse: true } };
const steps = {
  text: {},
  loop: { tools: { weather }, prepareStep, providerOptions, stopWhen: stepCountIs(2) },
  tools: { tools: { weather }, stopWhen: stepCountIs(2) },
  "required tool": { tools: { weather }, toolChoice: "required" },
  object: { output: answer },
  "tools and object": { tools: { weather }, output: answer, stopWhen: stepCountIs(2) },
};

let failed = 0;
for (const [name, model] of Object.entries(models)) {
  for (const [step, options] of Object.entries(steps)) {
    for (const streamed of [false, true]) {
      const title = `${name}, ${step}, streamed ${streamed}`;
      try {
        if (streamed) {
          let error;
          const result = streamText({ model, ...common, ...options, onError: (e) => { error = e.error; } });
          for await (const part of result.fullStream) if (part.type === "error") throw part.error;
          if (error) throw error;
          if (!((await result.totalUsage).outputTokens > 0)) throw new Error("no usage");
        } else {
          const result = await generateText({ model, ...common, ...options });
          if (!(result.usage.outputTokens > 0)) throw new Error("no usage");
        }
        console.log(`ok ${title}`);
      } catch (error) {
        // What the model says does not matter: an object that was cut off.
        if (NoObjectGeneratedError.isInstance(error) || NoOutputGeneratedError.isInstance(error)) {
          console.log(`ok ${title} (${error.name})`);
        } else {
          failed += 1;
          console.log(`FAILED ${title}\n    ${error.name}: ${error.message} ${error.responseBody ?? ""}`);
        }
      }
    }
  }
}
process.exit(failed > 0 ? 1 : 0);
