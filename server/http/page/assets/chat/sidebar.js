// The list of conversations: search, open, rename, delete with undo, import and export of all.

import { element } from "../dom.js";

const SEARCH_DELAY = 150;
const PAGE = 200; // Conversations that are listed at once; more on demand.

/** The list beside the messages. */
export class Sidebar {
  /**
   * @param {HTMLElement} node
   * @param {Store} store
   * @param {object} on  {open(id), fresh(), rename(conversation, title), remove(conversation), import(file), exportAll(suffix)}
   */
  constructor(node, store, on) {
    this.node = node;
    this.store = store;
    this.on = on;
    this.list = node.querySelector("ul");
    this.empty = node.querySelector(".empty");
    this.query = node.querySelector("input[type=search]");
    this.shown = PAGE;
    this.open = null;
    this.running = null;
    this.search = new AbortController();
    const picker = node.querySelector("input[type=file]");
    node.querySelector(".new").addEventListener("click", on.fresh);
    this.exports = [node.querySelector(".export-all"), node.querySelector(".export-text")];
    for (const [i, suffix] of ["json", "md"].entries()) this.exports[i].addEventListener("click", () => on.exportAll(suffix));
    node.querySelector(".import").addEventListener("click", () => picker.click());
    picker.addEventListener("change", () => {
      const [file] = picker.files;
      picker.value = "";
      if (file) on.import(file);
    });
    this.query.addEventListener("input", () => {
      clearTimeout(this.timer);
      this.shown = PAGE;
      this.timer = setTimeout(() => this.refresh(), SEARCH_DELAY);
    });
  }

  /** Read and show the list; `open` is the id of the conversation shown, `running` of the one that is answered. */
  async refresh({ open = this.open, running = this.running } = {}) {
    Object.assign(this, { open, running });
    this.search.abort();
    const search = (this.search = new AbortController());
    const words = this.query.value.toLowerCase().split(/\s+/).filter(Boolean);
    const all = await this.store.conversations();
    const texts = words.length ? await this.store.search(words, search.signal) : new Map();
    if (search.signal.aborted) return;
    const titled = ({ title }) => words.every((word) => title.toLowerCase().includes(word));
    const found = all.filter((one) => titled(one) || texts.has(one.id));
    const excerptOf = (one) => (titled(one) ? null : excerpt(texts.get(one.id), words));
    const rows = found.slice(0, this.shown).map((one) => this.#row(one, excerptOf(one)));
    if (found.length > this.shown) rows.push(this.#more(found.length));
    if (!this.list.querySelector("input")) this.#replace(rows);
    this.empty.textContent = found.length ? "" : words.length ? "Nothing found." : "No conversations yet.";
    for (const button of this.exports) button.disabled = all.length === 0;
  }

  // The focus stays on the same button of the same conversation.
  #replace(rows) {
    const focused = this.list.contains(document.activeElement) ? document.activeElement : null;
    const id = focused?.closest("li").dataset.id;
    const kind = focused?.className;
    this.list.replaceChildren(...rows);
    if (id) this.list.querySelector(`[data-id="${id}"] [class="${kind}"]`)?.focus();
  }

  #row(one, text) {
    const title = one.title || "Untitled";
    const open = element("button", { type: "button", class: "open" }, element("span", { class: "title" }, title));
    if (one.id === this.open) open.setAttribute("aria-current", "true");
    if (one.id === this.running) open.append(element("span", { class: "offscreen" }, " (is being answered)"), element("span", { class: "dot" }));
    open.append(element("small", {}, text ?? day(one.updated)));
    open.addEventListener("click", () => this.on.open(one.id));
    const rename = element("button", { type: "button", class: "quiet rename", "aria-label": `Rename ${title}`, title: "Rename" }, "✎");
    const remove = element("button", { type: "button", class: "quiet remove", "aria-label": `Delete ${title}`, title: "Delete" }, "×");
    const row = element("li", { "data-id": one.id }, open, rename, remove);
    rename.addEventListener("click", () => this.#rename(row, one));
    open.addEventListener("keydown", (event) => {
      if (event.key === "F2") this.#rename(row, one);
      if (event.key === "Delete") this.on.remove(one);
    });
    remove.addEventListener("click", () => this.on.remove(one));
    return row;
  }

  #rename(row, one) {
    const input = element("input", { type: "text", "aria-label": "Title", value: one.title, maxlength: 200 });
    let ended = false;
    const end = async (keep) => {
      if (ended) return; // An input that is removed loses the focus.
      ended = true;
      const title = input.value.trim();
      input.remove();
      if (keep && title && title !== one.title) await this.on.rename(one, title);
      await this.refresh();
      this.list.querySelector(`[data-id="${one.id}"] .open`)?.focus();
    };
    input.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" && event.key !== "Escape") return;
      event.preventDefault();
      event.stopPropagation();
      end(event.key === "Enter");
    });
    input.addEventListener("blur", () => end(true));
    row.replaceChildren(input);
    input.select();
    input.focus();
  }

  #more(total) {
    const more = element("button", { type: "button" }, `Show more of ${total}`);
    more.addEventListener("click", () => {
      this.shown += PAGE;
      this.refresh();
    });
    return element("li", { "data-id": "more" }, more);
  }
}

function excerpt(text, words) {
  const at = Math.max(0, text.toLowerCase().indexOf(words[0]) - 24);
  return `${at ? "…" : ""}${text.slice(at, at + 90).replaceAll(/\s+/g, " ")}`;
}

function day(time) {
  const date = new Date(time);
  const today = new Date().toDateString() === date.toDateString();
  return today
    ? date.toLocaleTimeString("en", { hour: "2-digit", minute: "2-digit", hour12: false })
    : date.toLocaleDateString("en", { day: "numeric", month: "short", year: "numeric" });
}
