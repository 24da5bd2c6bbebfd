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
      yield* parts(choice.delta ?? {}, choice.logprobs?.content ?? []);
    }
  }
}

// A chunk may have reasoning, text and pieces of calls; its tokens are those of all together.
function* parts(delta, entries) {
  const reasoning = delta.reasoning_content ?? delta.reasoning ?? "";
  const content = delta.content ?? "";
  const calls = (delta.tool_calls ?? []).map(({ index = 0, id, function: called }) => ({
    index,
    id,
    name: called?.name,
    arguments: called?.arguments,
  }));
  if (reasoning) yield* tokens(reasoning, content || calls.length ? [] : entries, { reasoning: true });
  if (reasoning && !content && !calls.length) return;
  // The tokens of a call have no text in the message: the call has it.
  const made = [...tokens(content, entries, calls.length ? { call: true } : {})];
  for (const [i, toolCall] of calls.entries()) {
    const name = (toolCall.name ?? "") + (toolCall.arguments ?? "");
    made[i] ??= { token: { text: "", name, logprob: null, special: false, alternatives: [], call: true } };
    made[i].token.toolCall = toolCall;
  }
  yield* made;
}

// The text of a chunk counts: its tokens may have none yet (a part of a character) or name a special token.
function* tokens(text, entries, kind) {
  const split = entries.length > 1 && entries.map((entry) => entry.token).join("") === text;
  if (!entries.length && text) {
    yield { token: { text, name: text, logprob: null, special: false, alternatives: [], ...kind } };
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
        ...kind,
      },
    };
  }
}
