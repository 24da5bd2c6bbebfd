// Says before sending that a conversation does not fit into the model's context, and offers what can be done.

import { element } from "../dom.js";
import { sizeOf } from "./attachments.js";

/** A question above the message box. */
export class FullContext {
  /**
   * @param {HTMLElement} node  Focusable.
   * @param {Context} context
   */
  constructor(node, context) {
    this.node = node;
    this.context = context;
    this.back = () => {};
  }

  /** Hide the question; returns whether it was shown. */
  hide() {
    const was = !this.node.hidden;
    this.node.hidden = true;
    if (was) this.back();
    return was;
  }

  /**
   * Return whether a request fits; if not, ask what to do.
   * @param {object[]} sent  The messages of the request.
   * @param {object[]} all  These, and those that are left out already; the last is the same.
   * @param {object} settings
   * @param {object} choices  {leaveOut(first), begin(): null if there is nothing to begin with, back()}
   */
  async check(sent, all, settings, { leaveOut, begin, back }) {
    this.node.hidden = true;
    const excess = await this.context.excess(sent, settings);
    if (excess === null || excess <= 0) return true;
    const first = await this.context.firstThatFits(all, settings);
    const parts = [element("p", {}, this.#reason(excess, settings))];
    const offer = (id, label, act) => {
      const button = element("button", { type: "button", id }, label);
      button.addEventListener("click", () => {
        this.node.hidden = true;
        act();
      });
      return button;
    };
    const buttons = [];
    if (first === null) {
      const lower = settings.maxTokens ? ", or lower the maximum of tokens" : "";
      const hint = `The last message does not fit even alone: shorten it, remove files or the system message${lower}.`;
      parts.push(element("p", {}, hint));
    } else {
      const dropped = all.slice(0, all.indexOf(first)).filter((message) => message.role === "user").length;
      const turns = dropped === 1 ? "the oldest turn" : `the oldest ${dropped} turns`;
      buttons.push(offer("full-leave-out", `Leave out ${turns}`, () => leaveOut(first)));
      if (begin) buttons.push(offer("full-begin", "Send in a new conversation", begin));
    }
    buttons.push(offer("full-back", "Go back", back));
    this.back = back;
    this.node.replaceChildren(...parts, element("div", { class: "actions" }, ...buttons));
    this.node.hidden = false;
    this.node.focus();
    return false;
  }

  #reason(excess, settings) {
    if (excess === Infinity) {
      return `This conversation is larger than a request may be (${sizeOf(this.context.mostBytes)}).`;
    }
    const { limit } = this.context;
    const room = this.context.room(settings);
    const used = limit + excess - room;
    const number = (value) => value.toLocaleString("en");
    const reply = settings.maxTokens ? "a reply may have" : "a reply needs at least";
    return (
      `The context is full: the conversation has ${number(used)} tokens, ${reply} ${number(room)}, ` +
      `and the model has room for ${number(limit)} in all.`
    );
  }
}
