// Prompts: POST /generate_stream, and what its events mean.

import { ApiError, messageOf, post } from "./api.js";
import { events } from "./stream.js";

export const path = "generate_stream";

/** The encoded body of a request. */
export function encode(prompt, settings) {
  const { temperature, grammar } = settings;
  const parameters = {
    max_new_tokens: settings.maxTokens,
    // Without this, temperature 1 is the default of this API, which takes the most likely token.
    do_sample: temperature === undefined ? undefined : temperature > 0,
    temperature,
    top_p: settings.topP,
    top_k: settings.topK,
    min_p: settings.minP,
    repetition_penalty: settings.repetitionPenalty,
    seed: settings.seed,
    stop: settings.stop,
    grammar: grammar && { type: grammar.kind, value: grammar.value },
    top_n_tokens: settings.alternatives || undefined,
    details: true,
  };
  return JSON.stringify({ inputs: prompt, parameters });
}

/** Send a request; returns the response and an async iterator of its tokens and its end. */
export async function open(body, signal) {
  const response = await post(path, body, signal);
  return { response, parts: read(response) };
}

async function* read(response) {
  for await (const data of events(response)) {
    const event = JSON.parse(data);
    const message = messageOf(event);
    if (message !== null) throw new ApiError(message);
    const { token, top_tokens: top = [], details } = event;
    yield {
      token: {
        text: token.special ? "" : token.text,
        name: token.text,
        id: token.id,
        logprob: token.logprob,
        special: token.special,
        alternatives: top.map((other) => ({ name: other.text, logprob: other.logprob })),
      },
    };
    if (event.generated_text !== null) {
      const { finish_reason, generated_tokens, seed, input_length, usage, ...others } = details ?? {};
      yield {
        end: {
          reason: finish_reason,
          tokens: generated_tokens,
          promptTokens: input_length,
          // A seed has 64 bits, more than a number holds exactly: take its digits from the text.
          seed: seed === null ? undefined : /"seed":(\d+)/.exec(data)?.[1],
          accounting: { ...usage, ...others },
        },
        warnings: event.warnings ?? [],
      };
    }
  }
}
