// The view that holds conversations: connects the list, the messages, the message box and the replies.

import { withFiles } from "./chat/attachments.js";
import { Composer } from "./chat/composer.js";
import { Context } from "./chat/context.js";
import { FullContext } from "./chat/full_context.js";
import { Notice } from "./chat/notice.js";
import { bodyOf, Replies } from "./chat/replies.js";
import { Session } from "./chat/session.js";
import { Sidebar } from "./chat/sidebar.js";
import { Store } from "./chat/store.js";
import { Thread } from "./chat/thread.js";
import { download, fileName, fromJson, toJson, toMarkdown } from "./chat/transfer.js";
import { newConversation } from "./chat/tree.js";
import { copy } from "./copy.js";
import { path } from "./conversation.js";
import { showCommand } from "./curl.js";
import { Run } from "./run.js";
import { keptScope, peek, read, snapshot, use } from "./settings.js";

const REREAD = 1000; // Milliseconds between readings of what another tab writes.
const DEFAULTS = { "max-tokens": "", temperature: "" };
const byId = (id) => document.getElementById(id);

/** The chat. Its conversation is in the address: `#chat/ID`. */
export class Chat {
  /** @param {function(?string, boolean)} moved  Called with the id of the conversation shown; true if it was opened. */
  constructor(moved) {
    this.view = byId("chat");
    this.moved = moved;
    this.active = false;
    this.canChat = true;
    this.run = new Run(this.view);
    this.notice = new Notice(byId("chat-notice"));
    this.context = new Context(byId("chat-context"));
    this.store = new Store((text) => this.notice.say(text), (id) => this.#changedElsewhere(id));
    this.session = new Session(this.store);
    this.fresh = keptScope("tessera.settings.chat", DEFAULTS);
    this.thread = new Thread(byId("chat-scroller"), byId("chat-messages"), byId("chat-end"), (...it) => this.#act(...it));
    this.replies = new Replies(this.run, () => this.#show());
    this.composer = new Composer(byId("chat-form"), () => this.update(), (text) => this.notice.say(text));
    this.full = new FullContext(byId("chat-full"), this.context);
    this.sidebar = new Sidebar(byId("conversations"), this.store, {
      open: (id) => this.open(id, true),
      fresh: () => this.open(null, true),
      rename: (conversation, title) => this.#rename(conversation, title),
      remove: (conversation) => this.#remove(conversation),
      import: (file) => this.#import(file),
      exportAll: () => this.#exportAll(),
    });
    this.command = showCommand(this.view.querySelector(".request"), () => {
      const settings = peek();
      return { path, body: settings && bodyOf(this.#next(), settings) };
    });
    byId("chat-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#submit();
    });
    this.#setUpMenu();
    this.#setUpFiles();
    byId("chat-view").addEventListener("change", (event) => this.#setForm(event.target.value));
    this.composer.use("new");
    this.sidebar.refresh();
  }

  /** Apply what /info says. */
  describe(info) {
    this.canChat = info.chat_template !== false;
    byId("chat-none").hidden = this.canChat;
    this.context.describe(info);
    this.update();
  }

  /** The view is shown: its settings apply. */
  enter() {
    this.active = true;
    this.#useSettings();
    this.#show();
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
    session ??= await Session.open(this.store, id);
    if (session === null) {
      this.notice.say("There is no such conversation in this browser.");
      session = new Session(this.store, newConversation());
    }
    this.session = session;
    this.moved(session.isNew ? null : id, chosen);
    this.composer.use(session.isNew ? "new" : id);
    delete byId("conversations").dataset.open;
    this.#useSettings();
    this.#show();
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
      else return this.full.hide() || this.composer.cancel();
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

  #useSettings() {
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
    const path = edited ? this.#before(edited) : session.path;
    return composer.isEmpty ? session.sent(path) : [...session.sent(path), { role: "user", ...composer.draft }];
  }

  #before(message) {
    return this.session.tree.path(message.id).slice(0, -1);
  }

  #show() {
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
    if (!live && session.path.some((message) => message.writing)) this.waiting = setTimeout(() => this.#show(), 5100);
    this.update();
  }

  async #submit() {
    const { composer, session } = this;
    const settings = this.run.busy || composer.isEmpty ? null : read();
    if (settings === null || this.checking) return;
    const edited = composer.editing;
    const before = edited ? this.#before(edited) : session.path;
    const draft = { role: "user", content: composer.draft.content, files: [...composer.draft.files] };
    if (!(await this.#fits(session, before, draft, settings, () => this.#submit(), true))) return;
    const changes = session.isNew ? { settings: snapshot() } : {};
    const user = session.add(before.at(-1), draft, changes);
    if (session.conversation.from === "next") session.save([], { from: user.id });
    if (changes.settings) {
      // A system message belongs to its conversation; the other settings are those of the next one too.
      this.fresh.save({ ...changes.settings, "chat-system": "" });
      this.moved(session.conversation.id, false);
      this.#useSettings();
      this.sidebar.refresh({ open: session.conversation.id });
    }
    composer.clear();
    if (changes.settings) composer.use(session.conversation.id);
    const answered = await this.#answer(session, user, settings);
    if (answered) return;
    // Nothing was answered: give the message back, so that it can be changed and sent again.
    await session.withdraw([user], before.at(-1));
    if (this.session !== session) return;
    if (session.isNew) {
      this.moved(null, false);
      composer.use("new");
      this.sidebar.refresh({ open: null });
    }
    if (composer.isEmpty) composer.fill(draft);
    this.#show();
  }

  // Get a reply to a message; returns false if it failed before anything came.
  async #answer(session, parent, settings) {
    const { head } = session.conversation;
    const message = session.add(parent, { role: "assistant", content: "", model: settings.model });
    this.#show();
    this.thread.toEnd();
    const { failure, empty } = await this.#stream(session, message, settings);
    if (!empty) return true;
    await session.withdraw([message], session.tree.get(head) ?? parent);
    if (this.session === session) this.#show();
    return failure === null;
  }

  async #stream(session, message, settings) {
    const item = this.thread.item(message);
    item.render(this.thread.form);
    const result = await this.replies.stream(session, message, item, settings);
    if (result.failure?.status === 404) {
      result.failure.message += "\nThis server does not serve chat; the Prompt view works without it.";
      this.run.show(result.failure);
    }
    this.#show();
    return result;
  }

  async #act(name, message, button) {
    const { session } = this;
    if (name === "edit") return this.composer.edit(message);
    if (this.run.busy) return undefined;
    if (name === "branch") {
      await session.choose(message);
      this.#show();
      this.thread.item(message)?.node.querySelector(".branches button:enabled")?.focus();
      return undefined;
    }
    const settings = read();
    if (settings === null) return undefined;
    const path = session.tree.path(message.id);
    const sent = name === "again" ? path.slice(0, -1) : path;
    const retry = () => this.#act(name, message, button);
    if (!(await this.#fits(session, sent.slice(0, -1), sent.at(-1), settings, retry, false))) return undefined;
    if (name !== "continue") return this.#answer(session, sent.at(-1), settings);
    const done = this.#stream(session, message, settings);
    this.thread.toEnd();
    return done;
  }

  // Whether a request fits into the context; if not, the choices are shown, and `retry` is called after one is taken.
  async #fits(session, before, last, settings, retry, isNew) {
    this.checking = true;
    const fits = await this.full.check([...session.sent(before), last], [...before, last], settings, {
      leaveOut: async (first) => {
        await session.save([], { from: first.id ?? "next" });
        this.#show();
        retry();
      },
      begin: isNew && before.length ? async () => {
        const { draft } = this.composer;
        this.composer.clear();
        await this.open(null, true);
        use({ values: { ...session.conversation.settings }, defaults: DEFAULTS, save: this.fresh.save });
        this.composer.fill(draft);
        retry();
      } : null,
      back: () => this.composer.text.focus(),
    });
    this.checking = false;
    return fits;
  }

  async #rename(conversation, title) {
    const open = conversation.id === this.session.conversation.id;
    await this.store.save(open ? this.session.conversation : conversation, { title });
    this.#show();
  }

  async #remove(conversation) {
    const { live } = this.replies;
    if (live?.session.conversation.id === conversation.id) {
      this.run.stop();
      return this.notice.say("The reply was stopped; delete the conversation now if you still want to.");
    }
    const removed = await this.store.remove(conversation);
    if (conversation.id === this.session.conversation.id) await this.open(null, true);
    else await this.sidebar.refresh();
    this.notice.say(`Deleted: ${conversation.title || "Untitled"}`, ["Undo", async () => {
      await this.store.restore(removed);
      await this.open(conversation.id, true);
    }]);
    return undefined;
  }

  async #import(file) {
    try {
      const bundles = fromJson(await file.text());
      for (const bundle of bundles) await this.store.restore(bundle);
      this.notice.say(`Imported: ${bundles.length} ${bundles.length === 1 ? "conversation" : "conversations"}`);
      if (bundles.length) await this.open(bundles[0].conversation.id, true);
    } catch (error) {
      this.notice.say(`${file.name} was not imported. ${error.message}`);
    }
  }

  async #exportAll() {
    const all = await this.store.conversations();
    const bundles = await Promise.all(all.map(async (conversation) => ({ conversation, messages: await this.store.messages(conversation.id) })));
    download(fileName("conversations", "json"), toJson(bundles));
  }

  #bundle() {
    return { conversation: this.session.conversation, messages: [...this.session.tree.messages.values()] };
  }

  #setUpMenu() {
    const menu = this.view.querySelector(".menu");
    const items = {
      "chat-copy": async () => {
        const done = await copy(toMarkdown([this.#bundle()]));
        this.notice.say(done ? "Copied as Markdown." : "The browser did not allow to copy.");
      },
      "chat-json": () => download(fileName(this.session.conversation.title, "json"), toJson([this.#bundle()])),
      "chat-markdown": () => download(fileName(this.session.conversation.title, "md"), toMarkdown([this.#bundle()])),
      "chat-delete": () => this.#remove(this.session.conversation),
    };
    for (const [id, act] of Object.entries(items)) {
      byId(id).addEventListener("click", () => {
        menu.open = false;
        menu.querySelector("summary").focus();
        act();
      });
    }
    menu.addEventListener("keydown", (event) => {
      if (event.key !== "Escape" || !menu.open) return;
      event.stopPropagation();
      menu.open = false;
      menu.querySelector("summary").focus();
    });
    document.addEventListener("click", (event) => {
      if (!menu.contains(event.target)) menu.open = false;
    });
    byId("conversations-toggle").addEventListener("click", () => {
      const list = byId("conversations");
      if ("open" in list.dataset) delete list.dataset.open;
      else this.#search();
    });
    byId("conversations-close").addEventListener("click", () => {
      delete byId("conversations").dataset.open;
      byId("conversations-toggle").focus();
    });
  }

  #setUpFiles() {
    const files = (event) => event.dataTransfer?.types.includes("Files");
    this.view.addEventListener("dragover", (event) => {
      if (!files(event)) return;
      event.preventDefault();
      this.view.classList.add("dropping");
    });
    this.view.addEventListener("dragleave", (event) => {
      if (!this.view.contains(event.relatedTarget)) this.view.classList.remove("dropping");
    });
    this.view.addEventListener("drop", (event) => {
      this.view.classList.remove("dropping");
      if (!files(event)) return;
      event.preventDefault();
      this.composer.attach([...event.dataTransfer.files]);
    });
  }

  #setForm(form) {
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
      if (await session.reread()) return this.#show();
      if (this.session !== session) return undefined;
      const { draft } = this.composer;
      await this.open(null);
      if (this.composer.isEmpty) this.composer.fill(draft);
      return this.notice.say("This conversation was deleted in another tab.");
    }, this.session.path.some((message) => message.writing) ? REREAD : 0);
  }
}
