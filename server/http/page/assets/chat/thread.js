// The list of messages: shows a branch, renders what comes near the screen, and follows a reply that streams.

import { element } from "../dom.js";
import { MessageItem } from "./message_item.js";

const ENDS = ["length", "stopped", "broken", "cut", "empty"]; // The ends of a reply that are said.
const END = 48; // A reader within so many pixels of the end is at it.

/** The messages of the open conversation. */
export class Thread {
  /**
   * @param {HTMLElement} scroller
   * @param {HTMLOListElement} list
   * @param {HTMLButtonElement} jump  Leads to the end; shown while the reader is elsewhere.
   * @param {function(string, object, HTMLElement)} act  See MessageItem.
   */
  constructor(scroller, list, jump, act) {
    this.scroller = scroller;
    this.list = list;
    this.act = act;
    this.items = new Map();
    this.divider = element("li", { class: "divider" }, "Messages above are no longer sent to the model");
    this.form = "text";
    this.follows = true;
    this.jump = jump;
    this.near = new IntersectionObserver((entries) => this.#render(entries), { root: scroller, rootMargin: "100% 0px" });
    scroller.addEventListener("scroll", () => this.#place());
    const resized = new ResizeObserver(() => this.#follow());
    resized.observe(list);
    resized.observe(scroller);
    jump.addEventListener("click", () => {
      this.toEnd();
      scroller.focus({ preventScroll: true });
    });
  }

  /** Show a session's branch; `kept` are items that stay as they are: those of a reply that streams. */
  show(session, { busy, kept = [] }) {
    const focused = this.list.contains(document.activeElement);
    const path = session.path;
    const first = path.length - session.sent(path).length;
    const items = new Map();
    for (const [i, message] of path.entries()) {
      const known = kept.find((item) => item.message === message) ?? this.items.get(message.id);
      const item = isOf(known, message) ? known : new MessageItem(message, this.act);
      item.message = message;
      if (item.view !== null) item.render(this.form);
      items.set(message.id, item);
      if (item.view === null) this.near.observe(item.node);
      const siblings = session.tree.siblings(message);
      const end = endOf(message, session, kept);
      item.describe({ siblings, end, last: i === path.length - 1, busy, leftOut: i < first });
    }
    for (const [id, item] of this.items) if (items.get(id) !== item) this.near.unobserve(item.node);
    this.items = items;
    const nodes = [...items.values()].map((item) => item.node);
    if (first > 0) nodes.splice(first, 0, this.divider);
    if (nodes.some((node, i) => this.list.children[i] !== node) || nodes.length !== this.list.children.length) {
      this.list.replaceChildren(...nodes);
    }
    this.#follow();
    // A button that was pressed may be gone.
    if (focused && !this.list.contains(document.activeElement)) this.scroller.focus({ preventScroll: true });
  }

  /** The item of a message that is shown. */
  item(message) {
    return this.items.get(message.id);
  }

  /** Choose how all messages are shown; see MessageView. */
  setForm(form) {
    this.form = form;
    for (const item of this.items.values()) if (item.view !== null) item.render(form);
  }

  /** Scroll to the end, and follow what is added. */
  toEnd() {
    this.follows = true;
    this.#follow();
  }

  #render(entries) {
    for (const { isIntersecting, target } of entries) {
      const item = this.items.get(target.dataset.id);
      if (!isIntersecting || item === undefined) continue;
      this.near.unobserve(target);
      if (item.view === null) item.render(this.form);
    }
  }

  #follow() {
    if (this.follows) this.scroller.scrollTop = this.scroller.scrollHeight;
    this.#place();
  }

  #place() {
    const { scrollTop, scrollHeight, clientHeight } = this.scroller;
    const rest = scrollHeight - clientHeight - scrollTop;
    // What grows below moves nobody; only the reader leaves the end, upwards.
    if (rest <= END) this.follows = true;
    else if (scrollTop < this.before) this.follows = false;
    this.before = scrollTop;
    this.jump.hidden = rest <= END || this.follows;
  }
}

// Another object may say the same: it was read again.
function isOf(item, message) {
  return item !== undefined && (item.message === message || JSON.stringify(item.message) === JSON.stringify(message));
}

function endOf(message, session, kept) {
  if (message.role !== "assistant" || kept.some((item) => item.message === message)) return null;
  if (session.isWriting(message)) return "elsewhere";
  if (message.writing !== undefined) return "cut";
  return ENDS.includes(message.reason) ? message.reason : null;
}
