// The model's context: how much of it a conversation takes, and what to leave out when it is full.

import { post } from "../api.js";
import { toRequest } from "./session.js";

const IDLE = 600; // Milliseconds without a change before a draft is counted.
const FRAME = 32; // Tokens that a template may add to a message.
const BODY = 4096; // Bytes of a request beside its messages.
const LEAST_REPLY = 64; // Room for a reply without a maximum; a small context has a sixteenth of it.

/** Counts tokens with POST /tokenize, which renders the conversation as the chat does. */
export class Context {
  /** @param {HTMLElement} node  An element of the role meter, with a bar and a text. */
  constructor(node) {
    this.node = node;
    this.limit = 0;
    this.mostBytes = Infinity;
    this.counts = false;
    this.timer = 0;
  }

  /** Apply what /info says. */
  describe({ max_total_tokens: limit, max_body_bytes: mostBytes, chat_template: counts }) {
    this.limit = limit;
    this.mostBytes = mostBytes ?? Infinity;
    this.counts = counts;
  }

  /** Tokens of the conversation's prompt; null if they cannot be counted. */
  async count(messages, settings) {
    if (!this.counts) return null;
    try {
      const body = JSON.stringify({ messages: toRequest(messages, settings.system) });
      if (body.length > this.mostBytes) return null;
      return (await (await post("tokenize", body)).json()).count;
    } catch {
      return null; // The reply to the request itself will say what is wrong.
    }
  }

  /** The tokens that a request needs beside its prompt. */
  room(settings) {
    return settings.maxTokens ?? Math.min(LEAST_REPLY, Math.ceil(this.limit / 16));
  }

  /**
   * Tokens by which a request exceeds the context; at most 0 if it fits, infinite if the server takes no such body, null
   * if that is not known.
   */
  async excess(messages, settings) {
    // The server's own error names a maximum that leaves no room for a prompt.
    if (!this.limit || this.room(settings) >= this.limit) return null;
    const size = bytes(messages, settings);
    if (size + BODY > this.mostBytes) return Infinity;
    // A token has at least one byte, so most conversations need no counting.
    const most = size + FRAME * (messages.length + 1);
    if (most + this.room(settings) <= this.limit) return 0;
    const count = await this.count(messages, settings);
    return count === null ? null : count + this.room(settings) - this.limit;
  }

  /**
   * The fewest oldest turns to leave out so that the others fit.
   * @param {object[]} messages  The last is about to be sent.
   * @returns {Promise<?object>} The first message that is still sent; null if even the last does not fit alone.
   */
  async firstThatFits(messages, settings) {
    const starts = messages.filter((message) => message.role === "user");
    let low = 0;
    let high = starts.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      const excess = await this.excess(messages.slice(messages.indexOf(starts[middle])), settings);
      if (excess !== null && excess <= 0) high = middle;
      else low = middle + 1;
    }
    return starts[low] ?? null;
  }

  /** Show how full the context is with these messages, counted when nothing has changed for a while. */
  show(messages, settings, { drafted }) {
    clearTimeout(this.timer);
    this.node.hidden = !this.limit;
    if (!this.limit) return undefined;
    const known = usageOf(messages.at(-1));
    if (!drafted && known !== null) return this.#set(known);
    if (messages.length === 0) return this.#set(0);
    if (!this.counts) return undefined;
    this.timer = setTimeout(async () => {
      const timer = this.timer;
      const count = await this.count(messages, settings);
      if (timer === this.timer && count !== null) this.#set(count);
    }, IDLE);
    return undefined;
  }

  #set(used) {
    const share = Math.min(used / this.limit, 1);
    const text = `${used.toLocaleString("en")} of ${this.limit.toLocaleString("en")} tokens`;
    this.node.dataset.level = share >= 0.95 ? "full" : share >= 0.8 ? "high" : "";
    this.node.setAttribute("aria-valuemax", this.limit);
    this.node.setAttribute("aria-valuenow", Math.min(used, this.limit));
    this.node.setAttribute("aria-valuetext", text);
    this.node.querySelector(".fill").style.inlineSize = `${share * 100}%`;
    this.node.querySelector(".text").textContent = text;
  }
}

function usageOf(message) {
  const { promptTokens, tokens } = message?.usage ?? {};
  return promptTokens === undefined ? null : promptTokens + (tokens ?? 0);
}

function bytes(messages, settings) {
  const texts = toRequest(messages, settings.system);
  return new TextEncoder().encode(JSON.stringify(texts)).length;
}
