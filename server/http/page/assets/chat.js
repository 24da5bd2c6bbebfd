// The view that holds conversations: connects the list, the messages, the message box and the replies.

import { Composer } from "./chat/composer.js";
import { Context } from "./chat/context.js";
import { FullContext } from "./chat/full_context.js";
import { Library } from "./chat/library.js";
import { Notice } from "./chat/notice.js";
import { closeList, setUpPanels } from "./chat/panels.js";
import { bodyOf, Replies } from "./chat/replies.js";
import { DEFAULTS, Session } from "./chat/session.js";
import { Sidebar } from "./chat/sidebar.js";
import { Store } from "./chat/store.js";
import { Thread } from "./chat/thread.js";
import { newConversation } from "./chat/tree.js";
import { Turns } from "./chat/turns.js";
import { path } from "./conversation.js";
import { showCommand } from "./curl.js";
import { Run } from "./run.js";
import { keptScope, peek, use } from "./settings.js";

const REREAD = 1000; // Milliseconds between readings of what another tab writes.
const byId = (id) => document.getElementById(id);

/** The chat. Its conversation is in the address: `#chat/ID`. */
export class Chat {
  /** @param {function(?string, boolean)} moved  Called with the id of the conversation shown; true if it was opened. */
  constructor(moved) {
    this.view = byId("chat");
    this.moved = moved;
    this.active = false;
    this.run = new Run(this.view);
    this.notice = new Notice(byId("chat-notice"), () => this.composer.text.focus());
    this.context = new Context(byId("chat-context"));
    this.store = new Store((text) => this.notice.say(text), (id) => this.#changedElsewhere(id));
    this.session = new Session(this.store);
    this.fresh = keptScope("tessera.settings.chat", DEFAULTS);
    this.thread = new Thread(byId("chat-scroller"), byId("chat-messages"), byId("chat-end"), (...it) => this.turns.act(...it));
    this.replies = new Replies(this.run, () => this.show());
    this.composer = new Composer(byId("chat-form"), () => this.update(), (text) => this.notice.say(text));
    this.full = new FullContext(byId("chat-full"), this.context);
    this.turns = new Turns(this);
    this.library = new Library(this);
    this.sidebar = new Sidebar(byId("conversations"), this.store, {
      open: (id) => this.open(id, true),
      fresh: () => this.open(null, true),
      rename: (conversation, title) => this.library.rename(conversation, title),
      remove: (conversation) => this.library.remove(conversation),
      import: (file) => this.library.import(file),
      exportAll: (suffix) => this.library.exportAll(suffix),
    });
    this.command = showCommand(this.view.querySelector(".request"), () => {
      const settings = peek();
      return { path, body: settings && bodyOf(this.#next(), settings) };
    });
    byId("chat-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.turns.submit();
    });
    setUpPanels(this.view, this.composer, () => this.#search());
    byId("chat-view").addEventListener("change", (event) => this.#setForm(event.target.value));
    this.composer.use("new");
    this.sidebar.refresh();
  }

  /** Apply what /info says. */
  describe(info) {
    byId("chat-none").hidden = info.chat_template !== false;
    byId("chat-completion").hidden = info.model_use !== "completion" || info.chat_template === false;
    // Code without a fence would lose its indentation.
    if (info.model_use === "completion" && !("form" in document.body.dataset)) this.#setForm("source");
    this.context.describe(info);
    this.update();
  }

  /** The view is shown: its settings apply. */
  enter() {
    this.active = true;
    this.useSettings();
    this.show();
    this.thread.toEnd();
  }

  /** Another view is shown. */
  leave() {
    this.active = false;
  }

  /** Show a conversation, or a new one (null); `chosen` if the reader asked for it here. */
  async open(id, chosen = false) {
    this.full.hide();
    const { live } = this.replies;
    let session = live?.session.conversation.id === id ? live.session : null;
    if (id === null) session = new Session(this.store, newConversation());
    const asked = (this.asked = Symbol("conversation"));
    session ??= await Session.open(this.store, id);
    if (asked !== this.asked) return; // Another one was chosen meanwhile.
    if (session === null) {
      this.notice.say("There is no such conversation in this browser.");
      session = new Session(this.store, newConversation());
    }
    this.session = session;
    this.moved(session.isNew ? null : id, chosen);
    this.composer.use(session.isNew ? "new" : id);
    delete byId("conversations").dataset.open;
    this.useSettings();
    this.show();
    this.thread.toEnd();
    if (chosen) this.composer.text.focus();
    this.sidebar.refresh({ open: session.isNew ? null : id });
  }

  /** The settings or the draft have changed. */
  update() {
    this.command();
    const settings = peek();
    if (settings === null || this.run.busy) return;
    this.context.show(this.#next(), settings, { drafted: !this.composer.isEmpty });
  }

  /** Act on a key that no control has taken; returns whether it means something here. */
  press(event) {
    const typing = event.target.closest("input, textarea, select, dialog");
    if (event.key === "Escape") {
      if (this.run.busy) this.run.stop();
      else return closeList() || this.full.hide() || this.composer.cancel();
    } else if (event.altKey && event.code === "KeyN") this.open(null, true);
    else if ((event.ctrlKey || event.metaKey) && event.key === "k") this.#search();
    else if (event.key === "/" && !typing) this.composer.text.focus();
    else if (event.key === "ArrowUp" && event.target === this.composer.text && this.composer.isEmpty) return this.#editLast();
    else return false;
    return true;
  }

  #search() {
    byId("conversations").dataset.open = "";
    this.sidebar.query.focus();
  }

  #editLast() {
    const last = this.session.path.findLast((message) => message.role === "user");
    if (last === undefined || this.run.busy || this.composer.editing) return false;
    this.composer.edit(last);
    return true;
  }

  /** Let the settings be those of the conversation. */
  useSettings() {
    if (!this.active) return;
    const { session } = this;
    if (session.isNew) return use(this.fresh);
    const save = (settings) => session.save([], { settings });
    use({ values: session.conversation.settings, defaults: DEFAULTS, save });
  }

  // The messages of a request that sends the draft now.
  #next() {
    const { composer, session } = this;
    const edited = composer.editing;
    const path = edited ? this.before(edited) : session.path;
    return composer.isEmpty ? session.sent(path) : [...session.sent(path), { role: "user", ...composer.draft }];
  }

  /** The messages before a message. */
  before(message) {
    return this.session.tree.path(message.id).slice(0, -1);
  }

  /** Show the conversation as it is now. */
  show() {
    const { session } = this;
    const { live } = this.replies;
    const kept = live?.session === session ? [live.item] : [];
    byId("chat-title").textContent = session.conversation.title || "New conversation";
    byId("chat-empty").hidden = !session.isNew;
    this.view.querySelector(".menu").hidden = session.isNew;
    this.thread.show(session, { busy: this.run.busy, kept });
    this.view.classList.toggle("busy", this.run.busy);
    this.sidebar.refresh({ running: live?.session.conversation.id ?? null });
    clearTimeout(this.waiting);
    // A reply that another tab writes may have been cut off.
    if (!live && session.path.some((message) => session.isWriting(message))) this.waiting = setTimeout(() => this.show(), 5100);
    this.update();
  }

  #setForm(form) {
    byId("chat-view").value = form;
    document.body.dataset.form = form;
    this.thread.setForm(form);
  }

  async #changedElsewhere(id) {
    this.sidebar.refresh();
    if (id !== this.session.conversation.id || this.session.isNew || this.replies.live?.session === this.session) return;
    clearTimeout(this.rereading);
    this.rereading = setTimeout(async () => {
      const { session } = this;
      if (this.replies.live?.session === session) return;
      if (await session.reread()) return this.show();
      if (this.session !== session) return undefined;
      const { draft } = this.composer;
      await this.open(null);
      if (this.composer.isEmpty) this.composer.fill(draft);
      return this.notice.say("This conversation was deleted in another tab.");
    }, this.session.path.some((message) => this.session.isWriting(message)) ? REREAD : 0);
  }
}
