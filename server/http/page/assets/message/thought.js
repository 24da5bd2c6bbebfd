// Shows the reasoning of a model: open while it streams, then folded.

import { element } from "../dom.js";
import { MarkdownView } from "./markdown_view.js";

/** The reasoning of one message. */
export class ThoughtView {
  constructor() {
    this.summary = element("summary", {}, "Thinking …");
    const body = element("div", { class: "markdown" });
    this.view = new MarkdownView(body);
    this.node = element("details", { class: "thought" }, this.summary, body);
    this.touched = false;
    this.summary.addEventListener("click", () => (this.touched = true));
  }

  /**
   * Show reasoning.
   * @param {string} text
   * @param {boolean} streaming  Whether it goes on.
   * @param {?number} seconds  How long it took; null if that is not known.
   */
  update(text, streaming, seconds) {
    const took = seconds === null ? "Thought" : `Thought for ${duration(seconds)}`;
    const title = streaming ? "Thinking …" : took;
    if (this.summary.textContent !== title) this.summary.textContent = title;
    // The reader's own choice stays.
    if (!this.touched && this.node.open !== streaming) this.node.open = streaming;
    this.view.update(text, !streaming);
  }
}

function duration(seconds) {
  if (seconds < 60) return `${Math.max(1, Math.round(seconds))} s`;
  const whole = Math.round(seconds);
  return `${Math.floor(whole / 60)} min ${whole % 60} s`;
}
