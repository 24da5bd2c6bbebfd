// Chat: POST /v1/chat/completions, and what the chunks of its stream mean.

import { ApiError, messageOf, post } from "./api.js";
import { events } from "./stream.js";

export const path = "v1/chat/completions";

/** The encoded body of a request. */
export function encode(messages, settings) {
  const { grammar } = settings;
  return JSON.stringify({
    model: settings.model,
    messages,
    continue_final_message: settings.continues || undefined,
    add_generation_prompt: settings.continues ? false : undefined,
    stream: true,
    stream_options: { include_usage: true },
    max_completion_tokens: settings.maxTokens,
    temperature: settings.temperature,
    top_p: settings.topP,
    top_k: settings.topK,
    min_p: settings.minP,
    repetition_penalty: settings.repetitionPenalty,
    seed: settings.seed,
    stop: settings.stop,
    response_format:
      grammar?.kind === "json"
        ? { type: "json_schema", json_schema: { name: "output", schema: grammar.value } }
        : undefined,
    structured_outputs: grammar?.kind === "regex" ? { regex: grammar.value } : undefined,
    logprobs: true,
    top_logprobs: settings.alternatives || undefined,
  });
}

/** Send a request; returns the response and an async iterator of its tokens and its end. */
export async function open(body, signal) {
  const response = await post(path, body, signal);
  return { response, parts: read(response) };
}

async function* read(response) {
  let reason;
  let usage;
  let warnings = [];
  for await (const data of events(response)) {
    if (data === "[DONE]") {
      const { prompt_tokens, completion_tokens, total_tokens, ...accounting } = usage ?? {};
      yield {
        end: { reason, tokens: completion_tokens, promptTokens: prompt_tokens, accounting },
        warnings,
      };
      return;
    }
    const chunk = JSON.parse(data);
    const message = messageOf(chunk);
    if (message !== null) throw new ApiError(message);
    usage = chunk.usage ?? usage;
    warnings = chunk.warnings ?? warnings;
    for (const choice of chunk.choices ?? []) {
      reason = choice.finish_reason ?? reason;
      const delta = choice.delta ?? {};
      yield* tokens((delta.reasoning_content ?? "") + (delta.content ?? ""), choice.logprobs?.content ?? []);
    }
  }
}

// The text of a chunk counts: its tokens may have none yet (a part of a character) or name a special token.
function* tokens(text, entries) {
  const split = entries.length > 1 && entries.map((entry) => entry.token).join("") === text;
  if (!entries.length && text) {
    yield { token: { text, name: text, logprob: null, special: false, alternatives: [] } };
  }
  for (const [i, entry] of entries.entries()) {
    const others = entry.top_logprobs ?? [];
    yield {
      token: {
        text: split ? entry.token : i === 0 ? text : "",
        name: entry.token,
        logprob: entry.logprob,
        special: false,
        alternatives: others.map((other) => ({ name: other.token, logprob: other.logprob })),
      },
    };
  }
}
