// The message box: what is written, the files beside it, and the message that is edited.

import { element } from "../dom.js";
import { readFile, sizeOf } from "./attachments.js";

const DRAFT = "tessera.draft.";

/** The message box. A draft belongs to its conversation, and survives a reload. */
export class Composer {
  /**
   * @param {HTMLFormElement} form
   * @param {function()} changed  Called when the draft changes.
   * @param {function(string)} refuse  Called with the reasons why files were not attached.
   */
  constructor(form, changed, refuse) {
    this.form = form;
    this.text = form.querySelector("textarea");
    this.list = form.querySelector(".files");
    this.banner = form.querySelector(".editing");
    this.changed = changed;
    this.refuse = refuse;
    this.files = [];
    this.drafts = new Map();
    this.key = "";
    this.editing = null;
    const picker = form.querySelector("input[type=file]");
    form.querySelector(".attach").addEventListener("click", () => picker.click());
    picker.addEventListener("change", async () => {
      await this.attach([...picker.files]);
      picker.value = "";
      this.text.focus();
    });
    this.text.addEventListener("input", () => this.#update());
    this.text.addEventListener("paste", (event) => {
      // Text stays text, also where a program offers a picture of it.
      if (!event.clipboardData.files.length || event.clipboardData.types.includes("text/plain")) return;
      event.preventDefault();
      this.attach([...event.clipboardData.files]);
    });
    this.text.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      form.requestSubmit();
    });
    this.banner.querySelector("button").addEventListener("click", () => this.cancel());
  }

  /** What would be sent. */
  get draft() {
    return { content: this.text.value, files: this.files };
  }

  get isEmpty() {
    return this.text.value.trim() === "" && this.files.length === 0;
  }

  /** Go on with the draft of another conversation. */
  use(key) {
    if (key === this.key) return;
    this.cancel(false);
    if (this.key) this.drafts.set(this.key, this.draft);
    this.key = key;
    this.fill(this.drafts.get(key) ?? { content: read(DRAFT + key), files: [] });
  }

  /** Replace the draft. */
  fill({ content, files = [] }) {
    this.text.value = content;
    this.files = [...files];
    this.#update();
  }

  /** Edit a message that was sent; what was being written comes back afterwards. */
  edit(message) {
    this.before = this.draft;
    this.editing = message;
    this.banner.hidden = false;
    this.fill(message);
    this.text.focus();
  }

  /** End the editing without sending; returns whether there was any. */
  cancel(focus = true) {
    if (this.editing === null) return false;
    this.editing = null;
    this.banner.hidden = true;
    this.fill(this.before);
    if (focus) this.text.focus();
    return true;
  }

  /** Empty the box after the draft was sent. */
  clear() {
    if (!this.cancel(false)) this.fill({ content: "" });
  }

  /** Attach files; those that are no text are refused. */
  async attach(files) {
    const results = await Promise.allSettled(files.map(readFile));
    const refused = results.filter((result) => result.status === "rejected");
    this.files.push(...results.filter((result) => result.status === "fulfilled").map((result) => result.value));
    this.refuse(refused.map((result) => result.reason.message).join("\n"));
    this.#update();
  }

  #update() {
    if (this.editing === null) write(DRAFT + this.key, this.text.value);
    grow(this.text);
    this.list.hidden = this.files.length === 0;
    this.list.replaceChildren(...this.files.map((file) => this.#chip(file)));
    this.changed();
  }

  #chip(file) {
    const open = element("button", { type: "button", class: "chip" }, `${file.name} `, element("small", {}, sizeOf(file.size)));
    open.addEventListener("click", () => showFile(file));
    const remove = element("button", { type: "button", class: "quiet", "aria-label": `Remove ${file.name}` }, "×");
    remove.addEventListener("click", () => {
      this.files = this.files.filter((other) => other !== file);
      this.#update();
      this.text.focus();
    });
    return element("li", {}, open, remove);
  }
}

// Firefox does not know `field-sizing`.
function grow(area) {
  if (CSS.supports("field-sizing", "content")) return;
  area.style.height = "";
  if (area.value) area.style.height = `${area.scrollHeight}px`;
}

/** Show a file's text in a dialog. */
export function showFile({ name, text }) {
  const dialog = document.getElementById("file-view");
  dialog.querySelector("h2").textContent = name;
  dialog.querySelector("pre").textContent = text;
  dialog.showModal();
}

function read(key) {
  try {
    return sessionStorage.getItem(key) ?? "";
  } catch {
    return "";
  }
}

function write(key, text) {
  try {
    if (text) sessionStorage.setItem(key, text);
    else sessionStorage.removeItem(key);
  } catch {
    // Storage is blocked: a draft lasts until the page is left.
  }
}
