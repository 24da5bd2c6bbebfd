// One message of the list: its text, its files, and what can be done with it.

import { copyOnClick } from "../copy.js";
import { element } from "../dom.js";
import { MessageView } from "../message_view.js";
import { sizeOf, withFiles } from "./attachments.js";
import { showFile } from "./composer.js";

const NAMES = { user: "You", assistant: "Model", system: "System", tool: "Tool" };
const ENDS = {
  length: "The reply reached its maximum length.",
  stopped: "You stopped this reply.",
  broken: "The connection broke off during this reply.",
  empty: "The reply is empty.",
  cut: "The page was left during this reply.",
  elsewhere: "Another tab is writing this reply.",
};

/** An element of the list. Until it comes near the screen, its text is shown as it is. */
export class MessageItem {
  /**
   * @param {object} message
   * @param {function(string, object, HTMLElement)} act  Called with the name of an action, the message and the button.
   */
  constructor(message, act) {
    this.message = message;
    this.act = act;
    this.output = element("div", { class: "output" });
    this.text = element("div", { class: "waiting" }, message.content);
    this.note = element("p", { class: "note" });
    this.tools = element("div", { class: "tools" });
    this.output.append(this.text);
    this.view = null;
    this.node = element(
      "li",
      { class: message.role, "data-id": message.id },
      element("h3", {}, NAMES[message.role], ...(message.model ? [element("small", {}, ` ${message.model}`)] : [])),
      ...(message.files?.length ? [files(message.files)] : []),
      this.output,
      this.note,
      this.tools,
    );
  }

  /** Mark the message as one whose reply streams. */
  set streams(streams) {
    this.node.classList.toggle("streaming", streams);
  }

  /** Render the message, in a form of `MessageView.setView`. */
  render(form) {
    if (this.view === null) {
      this.text.remove();
      this.view = new MessageView(this.output);
      this.view.setView(form);
      this.view.show(this.message);
    } else {
      this.view.setView(form);
    }
  }

  /**
   * Show what can be done.
   * @param {object} state  {siblings: object[], end: ?string, last: boolean, busy: boolean, leftOut: boolean}
   */
  describe({ siblings, end, last, busy, leftOut }) {
    const { message } = this;
    const state = JSON.stringify([siblings.map((one) => one.id), end, last, busy, leftOut, message.content !== ""]);
    if (state === this.state) return;
    this.state = state;
    this.node.classList.toggle("left-out", leftOut);
    this.note.textContent = end ? ENDS[end] : "";
    const button = (name, label, described = label) => {
      const node = element("button", { type: "button", class: "quiet", "aria-label": described }, label);
      node.disabled = busy;
      node.addEventListener("click", () => this.act(name, message, node));
      return node;
    };
    const buttons = [];
    if (siblings.length > 1) buttons.push(this.#branches(siblings, busy));
    const copy = element("button", { type: "button", class: "quiet", "aria-label": "Copy this message" }, "Copy");
    copyOnClick(copy, () => withFiles(message));
    buttons.push(copy);
    if (message.role === "user") buttons.push(button("edit", "Edit", "Edit this message"));
    if (message.role === "user" && last) buttons.push(button("answer", "Answer", "Answer this message"));
    if (message.role === "assistant") buttons.push(button("again", "Regenerate", "Regenerate this reply"));
    const open = ["length", "stopped", "broken", "cut"].includes(end) && message.content && !message.toolCalls?.length;
    if (last && open) buttons.push(button("continue", "Continue", "Continue this reply"));
    this.tools.replaceChildren(...buttons);
  }

  #branches(siblings, busy) {
    const at = siblings.indexOf(this.message);
    const step = (by, sign, label) => {
      const node = element("button", { type: "button", class: "quiet", "aria-label": label }, sign);
      node.disabled = busy || siblings[at + by] === undefined;
      node.addEventListener("click", () => this.act("branch", siblings[at + by], node));
      return node;
    };
    return element(
      "span",
      { class: "branches", role: "group", "aria-label": "Branches" },
      step(-1, "‹", "Branch before"),
      element("span", {}, `${at + 1} / ${siblings.length}`),
      step(1, "›", "Next branch"),
    );
  }
}

function files(list) {
  const chips = list.map((file) => {
    const open = element("button", { type: "button", class: "chip" }, `${file.name} `, element("small", {}, sizeOf(file.size)));
    open.addEventListener("click", () => showFile(file));
    return element("li", {}, open);
  });
  return element("ul", { class: "files", "aria-label": "Files" }, ...chips);
}
