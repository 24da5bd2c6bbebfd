// Shows one message: formatted, as tokens with their probabilities, or as its source.

import { blockOf, codeBlock, colour } from "./message/code.js";
import { element } from "./dom.js";
import { beginsAsJson, indent, isJson } from "./message/json.js";
import { load } from "./message/libraries.js";
import { MarkdownView } from "./message/markdown_view.js";
import { divide } from "./message/reasoning.js";
import { ThoughtView } from "./message/thought.js";
import { TokenView } from "./tokens.js";
import { CallsView, result } from "./message/tools.js";
import { verbatim } from "./message/verbatim.js";
import { LONGEST, visible } from "./message/visible.js";

// A frame that takes longer than this many milliseconds, with its layout, is followed by a pause of this many times its
// length, so that the page stays usable beside a long block.
const SHORT_FRAME = 16;
const PAUSE = 2;
// Of more tokens, each of which takes about a kilobyte, the oldest lose their probabilities.
const MOST_TOKENS = 50_000;

/** The view of a message, which is complete or streams. */
export class MessageView {
  #view = "text";
  #frame = 0;
  #timer = 0;
  #next = 0;

  /**
   * @param {HTMLElement} node  An element without children: the body of the message.
   * @param {{onflush: function()}} options  `onflush` is called after each change of the elements.
   */
  constructor(node, { onflush = () => {} } = {}) {
    this.node = node;
    this.onflush = onflush;
    this.#reset();
  }

  /** The answer: what the model wrote without its reasoning. Of other roles, the content. */
  get text() {
    return this.#parts(true).answer;
  }

  /** The reasoning, or "". */
  get reasoning() {
    return this.#parts(true).reasoning;
  }

  /** How long the reasoning took, in seconds; null if that is not known. */
  get reasoningSeconds() {
    return this.seconds;
  }

  /** The calls of tools: objects with id, name and arguments, a text that should be JSON. */
  get toolCalls() {
    return this.calls.map(({ id, name, arguments: given }) => ({ id, name, arguments: given }));
  }

  /**
   * Show a complete message. Tokens that are appended later continue it.
   * @param {{role: string, content: string|object[]|null, reasoning: ?string, reasoningSeconds: ?number,
   *   toolCalls: ?object[], toolCallId: ?string, name: ?string}} message
   */
  show(message) {
    this.#reset();
    this.role = message.role ?? "assistant";
    this.content = textOf(message.content);
    this.before = this.content;
    this.thoughts = message.reasoning ?? "";
    this.seconds = message.reasoningSeconds ?? null;
    this.name = message.name ?? message.toolCallId ?? "";
    this.calls = (message.toolCalls ?? []).map(({ id, name, arguments: given }) => ({
      id: id ?? null,
      name: String(name ?? ""),
      arguments: typeof given === "string" ? given : JSON.stringify(given ?? {}),
    }));
    this.flush();
  }

  /**
   * Add a part of the stream, as conversation.js yields it; it is painted with one of the next frames.
   * @param {object} part
   */
  append(part) {
    this.final = false;
    if (part.reasoning) {
      this.began ??= performance.now();
      this.thoughts += part.text;
    } else {
      this.content += part.text;
      if (part.toolCall) this.#call(part.toolCall);
    }
    this.tokens.push(part);
    if (this.tokens.length > MOST_TOKENS) this.#forget();
    this.#schedule();
  }

  /** Paint everything: the message is complete. */
  flush() {
    this.final = true;
    this.#paint();
  }

  /** Empty the message; `prefix` is shown before the first token, and is no part of the text. */
  clear(prefix = "") {
    this.#reset();
    this.prefix = prefix;
    this.#paint();
  }

  /**
   * Choose what is shown.
   * @param {"text"|"tokens"|"source"} view
   */
  setView(view) {
    if (view === this.#view) return;
    this.#view = view;
    this.tokenView = null;
    this.#paint();
  }

  #reset() {
    cancelAnimationFrame(this.#frame);
    clearTimeout(this.#timer);
    this.#frame = this.#timer = this.#next = 0;
    this.role = "assistant";
    this.prefix = this.before = this.content = this.thoughts = this.name = "";
    this.calls = [];
    this.tokens = [];
    this.final = true;
    this.began = this.seconds = null;
    this.slots = this.thought = this.markdown = this.callsView = this.tokenView = null;
    this.node.replaceChildren();
    this.node.classList.add("message-body");
  }

  #call({ index, id, name, arguments: added }) {
    let call = this.calls.find((one) => one.index === index);
    if (call === undefined) this.calls.push((call = { index, id: null, name: "", arguments: "" }));
    call.id = id ?? call.id;
    call.name += name ?? "";
    call.arguments += added ?? "";
  }

  #forget() {
    const oldest = this.tokens.splice(0, MOST_TOKENS / 2);
    this.before += oldest.map((token) => (token.call ? token.name : token.text)).join("");
    this.tokenView = null;
  }

  #parts(final) {
    if (this.role !== "assistant") return { reasoning: this.thoughts, answer: this.content, open: false };
    if (this.thoughts === "") return divide(this.content, final);
    return { reasoning: this.thoughts, answer: this.content, open: this.content === "" && this.calls.length === 0 };
  }

  #schedule() {
    if (this.#frame || this.#timer) return;
    const wait = this.#next - performance.now();
    const ask = () => {
      this.#timer = 0;
      this.#frame = requestAnimationFrame(() => this.#paint());
    };
    if (wait > 0) this.#timer = setTimeout(ask, wait);
    else ask();
  }

  #paint() {
    cancelAnimationFrame(this.#frame);
    clearTimeout(this.#timer);
    this.#frame = this.#timer = 0;
    const begin = performance.now();
    const parts = this.#parts(this.final);
    this.#time(parts, begin);
    if (this.#view === "tokens") this.#paintTokens();
    else if (this.#view === "source") this.node.replaceChildren(this.#source());
    else this.#paintText(parts);
    this.onflush();
    // The layout follows, before the next task.
    setTimeout(() => {
      const end = performance.now();
      this.#next = end - begin > SHORT_FRAME ? end + PAUSE * (end - begin) : 0;
    });
  }

  // Reasoning within the text is known only when it is divided.
  #time({ reasoning, open }, now) {
    if (reasoning && open && !this.final) this.began ??= now;
    if (this.began !== null && (this.final || !open)) this.seconds ??= (now - this.began) / 1000;
  }

  #paintText({ reasoning, answer, open }) {
    const { prefix, thought, text, calls } = (this.slots ??= this.#makeSlots());
    if (text.parentNode !== this.node) this.node.replaceChildren(prefix, thought, text, calls);
    this.#load();
    if (this.role === "assistant") {
      if (reasoning) this.#paintThought(reasoning, open && !this.final);
      this.#paintAnswer(answer);
    } else {
      text.replaceChildren(...(this.role === "tool" ? [result(this.content, this.name)] : verbatim(this.content)));
      colour(text, true);
    }
    if (this.calls.length) (this.callsView ??= new CallsView(calls)).update(this.calls, this.final);
  }

  #load() {
    if (this.loads) return;
    this.loads = true;
    load(() => {
      this.loads = false;
      if (this.#view === "text") this.#paint();
    });
  }

  #makeSlots() {
    const slot = (name) => element("div", { class: name });
    const prefix = element("div", { class: "prefix plain" }, ...visible(this.prefix));
    return { prefix, thought: slot("reasoning"), text: slot("markdown"), calls: slot("calls") };
  }

  #paintThought(reasoning, streaming) {
    if (this.thought === null) {
      this.thought = new ThoughtView();
      this.slots.thought.append(this.thought.node);
    }
    this.thought.update(reasoning, streaming, this.seconds);
  }

  #paintAnswer(answer) {
    const { text } = this.slots;
    const json = this.final ? isJson(answer) : beginsAsJson(answer);
    if (json) {
      const block = codeBlock(indent(answer), "json");
      if (this.markdown !== null || text.firstChild === null) text.replaceChildren(block);
      else blockOf(text.firstChild).update(blockOf(block));
      this.markdown = null;
      return colour(text, this.final);
    }
    if (this.markdown === null) {
      text.replaceChildren();
      this.markdown = new MarkdownView(text);
    } else if (!answer.startsWith(this.shown)) {
      // What seemed to be the answer was reasoning.
      this.markdown.clear();
    }
    this.shown = answer;
    this.markdown.update(answer, this.final);
  }

  #paintTokens() {
    if (this.tokenView === null) {
      const output = element("div", { class: "output" });
      this.tokenView = new TokenView(output);
      this.tokenView.clear((this.prefix + this.before).slice(-LONGEST));
      this.told = 0;
      const which = this.tokens.length ? "the first" : "these";
      const note = `The probabilities of ${which} tokens were not kept.`;
      const missing = this.before ? [element("p", { class: "note" }, note)] : [];
      this.node.replaceChildren(output, ...missing);
    }
    for (; this.told < this.tokens.length; this.told += 1) this.tokenView.append(this.tokens[this.told]);
    this.tokenView.flush();
  }

  #source() {
    const calls = this.calls.map(({ id, name, arguments: given }) => ({
      id,
      type: "function",
      function: { name, arguments: given },
    }));
    const parts = [
      this.thoughts && `<think>\n${this.thoughts}\n</think>`,
      this.prefix + this.content,
      calls.length && JSON.stringify(calls, null, 2),
    ];
    const text = parts.filter(Boolean).join("\n\n");
    return element("pre", { class: "source", tabindex: 0, "aria-label": "Source" }, ...visible(text, true));
  }
}

/** The text of a message's content, which may be a list of parts. */
function textOf(content) {
  if (typeof content === "string") return content;
  if (!Array.isArray(content)) return content == null ? "" : JSON.stringify(content);
  return content.map((part) => (typeof part === "string" ? part : (part?.text ?? `[${part?.type ?? "part"}]`))).join("\n");
}
