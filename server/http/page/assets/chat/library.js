// What is done with whole conversations: rename, delete, copy, import and export.

import { copy } from "../copy.js";
import { download, fileName, fromJson, toJson, toMarkdown } from "./transfer.js";

/** The conversations of a chat, and the menu of the one that is shown. */
export class Library {
  /** @param {Chat} chat */
  constructor(chat) {
    this.chat = chat;
    this.#setUpMenu(chat.view.querySelector(".menu"));
  }

  /** Give a conversation another title. */
  async rename(conversation, title) {
    const open = conversation.id === this.chat.session.conversation.id;
    await this.chat.store.save(open ? this.chat.session.conversation : conversation, { title });
    this.chat.show();
  }

  /** Delete a conversation; it can be undone. */
  async remove(conversation) {
    const { live } = this.chat.replies;
    if (live?.session.conversation.id === conversation.id) {
      this.chat.run.stop();
      return this.chat.notice.say("The reply was stopped; delete the conversation now if you still want to.");
    }
    const removed = await this.chat.store.remove(conversation);
    if (conversation.id === this.chat.session.conversation.id) await this.chat.open(null, true);
    else await this.chat.sidebar.refresh();
    this.chat.notice.say(`Deleted: ${conversation.title || "Untitled"}`, ["Undo", async () => {
      await this.chat.store.restore(removed);
      await this.chat.open(conversation.id, true);
    }]);
    return undefined;
  }

  /** Import conversations from a file. */
  async import(file) {
    try {
      const bundles = fromJson(await file.text());
      for (const bundle of bundles) await this.chat.store.restore(bundle);
      this.chat.notice.say(`Imported: ${bundles.length} ${bundles.length === 1 ? "conversation" : "conversations"}`);
      if (bundles.length) await this.chat.open(bundles[0].conversation.id, true);
    } catch (error) {
      this.chat.notice.say(`${file.name} was not imported. ${error.message}`);
    }
  }

  /** Save all conversations as a file: "json" or "md". */
  async exportAll(suffix) {
    const all = await this.chat.store.conversations();
    const bundle = async (conversation) => ({ conversation, messages: await this.chat.store.messages(conversation.id) });
    const bundles = await Promise.all(all.map(bundle));
    download(fileName("conversations", suffix), suffix === "md" ? toMarkdown(bundles) : toJson(bundles));
  }

  #bundle() {
    return { conversation: this.chat.session.conversation, messages: [...this.chat.session.tree.messages.values()] };
  }

  #setUpMenu(menu) {
    const items = {
      "chat-copy": async () => {
        const done = await copy(toMarkdown([this.#bundle()]));
        this.chat.notice.say(done ? "Copied as Markdown." : "The browser did not allow to copy.");
      },
      "chat-json": () => download(fileName(this.chat.session.conversation.title, "json"), toJson([this.#bundle()])),
      "chat-markdown": () => download(fileName(this.chat.session.conversation.title, "md"), toMarkdown([this.#bundle()])),
      "chat-delete": () => this.remove(this.chat.session.conversation),
    };
    for (const [id, act] of Object.entries(items)) {
      document.getElementById(id).addEventListener("click", () => {
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
  }
}
