// Shows generated tokens as they arrive, marks them by probability, and describes one on hover, tap or focus.

import { element } from "./dom.js";

// Lowest probability of each level; level 0 has no mark.
const LEVELS = [0.9, 0.5, 0.2, 0.05, 0];
const tip = document.getElementById("token-details");
let shown = null;

/** The tokens of one output. One tab stop; arrow keys, Home and End move between tokens. */
export class TokenView {
  /** @param {HTMLElement} node */
  constructor(node) {
    this.node = node;
    this.tokens = [];
    this.text = "";
    this.pending = [];
    this.frame = 0;
    this.onflush = () => {};
    node.addEventListener("pointerover", (event) => this.#describe(event.target));
    node.addEventListener("pointerleave", hide);
    node.addEventListener("focusin", (event) => this.#describe(event.target));
    node.addEventListener("focusout", hide);
    node.addEventListener("keydown", (event) => this.#move(event));
  }

  /** Empty the output; `prefix` is shown before the first token. */
  clear(prefix = "") {
    hide();
    cancelAnimationFrame(this.frame);
    this.frame = 0;
    this.tokens = [];
    this.pending = [];
    this.text = "";
    this.node.replaceChildren(...(prefix ? [element("span", { class: "prefix" }, prefix)] : []));
  }

  /** Add a token; it is painted with the next frame. */
  append(token) {
    this.text += token.text;
    this.pending.push(token);
    this.frame ||= requestAnimationFrame(() => this.flush());
  }

  /** Paint the tokens that wait. Needed at the end, since a hidden tab has no frames. */
  flush() {
    cancelAnimationFrame(this.frame);
    this.frame = 0;
    const nodes = this.pending.map((token) => {
      const index = this.tokens.push(token) - 1;
      const attributes = { class: "token", "data-index": index, tabindex: index ? -1 : 0 };
      if (token.special) attributes.class += " special";
      if (token.text.endsWith("\n")) attributes.class += " newline";
      if (token.logprob !== null) attributes["data-level"] = level(token.logprob);
      return element("span", attributes, token.special || token.call ? token.name : token.text);
    });
    this.pending = [];
    this.node.append(...nodes);
    this.onflush();
  }

  #describe(target) {
    const token = this.tokens[target.dataset.index];
    if (token === undefined) return hide();
    describe(token, target);
  }

  #move(event) {
    const from = Number(event.target.dataset.index);
    const last = this.tokens.length - 1;
    const to = { ArrowRight: from + 1, ArrowLeft: from - 1, Home: 0, End: last }[event.key];
    if (Number.isNaN(from) || to === undefined || to < 0 || to > last) return;
    event.preventDefault();
    const next = this.node.querySelector(`[data-index="${to}"]`);
    event.target.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  }
}

/** Hide the description; returns whether one was shown. */
export function hide() {
  const was = shown !== null;
  shown?.removeAttribute("aria-describedby");
  shown = null;
  tip.hidden = true;
  return was;
}

function level(logprob) {
  const probability = Math.exp(logprob);
  return LEVELS.findIndex((lowest) => probability >= lowest);
}

function describe(token, node) {
  hide();
  const others = token.alternatives.filter((other) => other.name !== token.name);
  const known = token.alternatives.length > others.length;
  const rows = [{ ...token, chosen: true }, ...others].sort((a, b) => b.logprob - a.logprob);
  const id = token.id === undefined ? "" : `token ${token.id}`;
  const rank = known && token.alternatives.length > 1 ? `, rank ${rows.findIndex((row) => row.chosen) + 1}` : "";
  const value = token.logprob === null ? "no log-probability" : `log-probability ${number(token.logprob)}`;
  tip.replaceChildren(
    element("p", {}, [id, value].filter(Boolean).join(", ") + rank),
    element("table", {}, element("tbody", {}, ...rows.map(row))),
  );
  tip.hidden = false;
  node.setAttribute("aria-describedby", tip.id);
  shown = node;
  place(node);
}

function row({ name, logprob, chosen = false }) {
  const probability = logprob === null ? NaN : Math.exp(logprob);
  const meter = element("span", { class: "bar" });
  meter.style.inlineSize = `${(probability || 0) * 100}%`;
  return element(
    "tr",
    { class: chosen && "chosen" },
    element("th", { scope: "row" }, visible(name), ...(chosen ? [element("span", { class: "offscreen" }, " (chosen)")] : [])),
    element("td", { class: "meter" }, meter),
    element("td", {}, Number.isNaN(probability) ? "" : percent(probability)),
  );
}

function place(node) {
  const rects = node.getClientRects();
  const at = rects[0] ?? node.getBoundingClientRect();
  const { offsetWidth: width, offsetHeight: height } = tip;
  const left = Math.max(8, Math.min(at.left, document.documentElement.clientWidth - width - 8));
  const below = at.bottom + 6;
  const top = below + height > innerHeight && at.top - height - 6 > 0 ? at.top - height - 6 : below;
  tip.style.left = `${left + scrollX}px`;
  tip.style.top = `${top + scrollY}px`;
}

function visible(text) {
  if (text === "") return "(part of a character)";
  return text.replaceAll(" ", "␣").replaceAll("\n", "↵").replaceAll("\t", "⇥").replaceAll("\r", "␍");
}

function number(value) {
  return value.toFixed(3).replace("-", "−");
}

function percent(probability) {
  if (probability > 0.9995) return "100 %";
  return probability >= 0.001 ? `${(probability * 100).toFixed(1)} %` : "< 0.1 %";
}
