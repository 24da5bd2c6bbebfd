// Sends messages and gets replies to them: new ones, edited ones, other replies and continued ones.

import { read, snapshot, use } from "../settings.js";
import { DEFAULTS } from "./session.js";

/** The turns of the conversation that a chat shows. */
export class Turns {
  /** @param {Chat} chat */
  constructor(chat) {
    this.chat = chat;
    this.checking = false;
  }

  /** Send the draft. */
  async submit() {
    const { composer, session } = this.chat;
    const settings = this.chat.run.busy || composer.isEmpty ? null : read();
    if (settings === null || this.checking) return;
    const edited = composer.editing;
    const before = edited ? this.chat.before(edited) : session.path;
    const draft = { role: "user", content: composer.draft.content, files: [...composer.draft.files] };
    if (!(await this.#fits(session, before, draft, settings, () => this.submit(), true))) return;
    const changes = session.isNew ? { settings: snapshot() } : {};
    const user = session.add(before.at(-1), draft, changes);
    if (session.conversation.from === "next") session.save([], { from: user.id });
    if (changes.settings) {
      // A system message belongs to its conversation; the other settings are those of the next one too.
      this.chat.fresh.save({ ...changes.settings, "chat-system": "" });
      this.chat.moved(session.conversation.id, false);
      this.chat.useSettings();
      this.chat.sidebar.refresh({ open: session.conversation.id });
    }
    composer.clear();
    if (changes.settings) composer.use(session.conversation.id);
    const answered = await this.#answer(session, user, settings);
    if (answered) return;
    // Nothing was answered: give the message back, so that it can be changed and sent again.
    const removed = session.withdraw([user], before.at(-1));
    if (this.chat.session === session) {
      if (session.isNew) {
        this.chat.moved(null, false);
        composer.use("new");
        this.chat.useSettings();
      }
      if (composer.isEmpty) composer.fill(draft);
      this.chat.show();
    }
    await removed;
    this.chat.sidebar.refresh(session.isNew && this.chat.session === session ? { open: null } : {});
  }

  // Get a reply to a message; returns false if it failed before anything came.
  async #answer(session, parent, settings) {
    const { head } = session.conversation;
    const message = session.add(parent, { role: "assistant", content: "", model: settings.model });
    this.chat.show();
    this.chat.thread.toEnd();
    const { failure, empty } = await this.#stream(session, message, settings);
    if (!empty) return true;
    session.withdraw([message], session.tree.get(head) ?? parent);
    if (this.chat.session === session) this.chat.show();
    return failure === null;
  }

  async #stream(session, message, settings) {
    const item = this.chat.thread.item(message);
    item.render(this.chat.thread.form);
    const result = await this.chat.replies.stream(session, message, item, settings);
    if (result.failure?.status === 404) {
      result.failure.message += "\nThis server does not serve chat; the Prompt view works without it.";
      this.chat.run.show(result.failure);
    }
    this.chat.show();
    return result;
  }

  /** Act on a message: see MessageItem. */
  async act(name, message, button) {
    const { session } = this.chat;
    if (name === "edit") return this.chat.composer.edit(message);
    if (this.chat.run.busy) return undefined;
    if (name === "branch") {
      session.choose(message);
      this.chat.show();
      this.chat.thread.item(message)?.node.querySelector(".branches button:enabled")?.focus();
      return undefined;
    }
    const settings = read();
    if (settings === null) return undefined;
    const path = session.tree.path(message.id);
    const sent = name === "again" ? path.slice(0, -1) : path;
    if (!sent.length) return undefined;
    const retry = () => this.act(name, message, button);
    if (!(await this.#fits(session, sent.slice(0, -1), sent.at(-1), settings, retry, false))) return undefined;
    if (name !== "continue") return this.#answer(session, sent.at(-1), settings);
    const done = this.#stream(session, message, settings);
    this.chat.thread.toEnd();
    return done;
  }

  // Whether a request fits into the context and should be sent. If it does not fit, the choices are shown, and `retry` is
  // called after one is taken.
  async #fits(session, before, last, settings, retry, isNew) {
    this.checking = true;
    const asked = this.chat.full.check([...session.sent(before), last], [...before, last], settings, {
      leaveOut: async (first) => {
        await session.save([], { from: first.id ?? "next" });
        this.chat.show();
        retry();
      },
      begin: isNew && before.length ? async () => {
        const { draft } = this.chat.composer;
        this.chat.composer.clear();
        await this.chat.open(null, true);
        use({ values: { ...session.conversation.settings }, defaults: DEFAULTS, save: this.chat.fresh.save });
        this.chat.composer.fill(draft);
        retry();
      } : null,
      back: () => this.chat.composer.text.focus(),
    });
    const fits = await asked.finally(() => (this.checking = false));
    // Another conversation may have been opened meanwhile.
    return fits && this.chat.session === session;
  }
}
