// A line that says what happened, with an offer such as Undo; it stays until it is dismissed or replaced.

import { element } from "../dom.js";

/** The notices of the chat. Screen readers read them as they appear. */
export class Notice {
  /**
   * @param {HTMLElement} node  An element of the role status.
   * @param {function()} back  Called when a notice is dismissed, to place the focus.
   */
  constructor(node, back) {
    this.node = node;
    this.back = back;
    this.clear();
  }

  /** Say something; `offer` is a pair of a label and what its button does. */
  say(text, offer = null) {
    if (text === "") return;
    const parts = [element("p", {}, text)];
    if (offer) {
      const [label, act] = offer;
      const button = element("button", { type: "button" }, label);
      button.addEventListener("click", () => {
        this.clear();
        act();
      });
      parts.push(button);
    }
    const dismiss = element("button", { type: "button", class: "quiet", "aria-label": "Dismiss" }, "×");
    dismiss.addEventListener("click", () => {
      this.clear();
      this.back();
    });
    this.node.replaceChildren(...parts, dismiss);
  }

  clear() {
    this.node.replaceChildren();
  }
}
