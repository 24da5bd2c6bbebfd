// Keeps conversations in this browser's IndexedDB, each message as a record of its own; in memory where that fails.

import { conversationOf, messageOf } from "./records.js";

const NAME = "tessera";
const CONVERSATIONS = "conversations";
const MESSAGES = "messages";
const BATCH = 500;
const PATIENCE = 5000; // Milliseconds after which a database that does not open is given up.
// What a person can do about an error of the database, by its name.
const REASONS = {
  QuotaExceededError:
    "The browser's storage is full: what is new is lost when the page is left. Export it, or delete conversations.",
  VersionError:
    "A newer version of this page has stored the conversations of this browser: this version cannot read them, and what is " +
    "new is lost when the page is left.",
};

/** Conversations and messages. Every change is one transaction, so tabs of one browser do not lose each other's. */
export class Store {
  /**
   * @param {function(string)} report  Called once, with the reason why nothing more is kept.
   * @param {function(string)} changed  Called with the id of a conversation that another tab has changed.
   */
  constructor(report, changed) {
    this.report = report;
    this.database = null;
    // What could not be written; it hides what the database has.
    this.unwritten = { [CONVERSATIONS]: new Map(), [MESSAGES]: new Map() };
    this.channel = channel();
    if (this.channel) this.channel.onmessage = (event) => changed(String(event.data));
    this.opening = this.#open();
  }

  /** All conversations, the last changed first. */
  async conversations() {
    const found = (await this.#read(CONVERSATIONS, (store) => store.getAll())).map(conversationOf);
    return found.sort((a, b) => b.updated - a.updated);
  }

  /** A conversation; null if there is none with this id. */
  async conversation(id) {
    return (await this.conversations()).find((one) => one.id === id) ?? null;
  }

  /** The messages of a conversation, in no order. */
  async messages(id) {
    const found = await this.#read(MESSAGES, (store) => store.index("conversation").getAll(id));
    return found.filter((message) => message.conversation === id).map(messageOf);
  }

  /**
   * Write messages, and changes of their conversation; fields that another tab changed meanwhile are kept.
   * @param {object} conversation  Written as it is if the database does not have it.
   * @param {object} changes
   * @param {object[]} messages
   */
  async save(conversation, changes = {}, messages = []) {
    Object.assign(conversation, changes);
    await this.#write((conversations, stored) => {
      const read = conversations.get(conversation.id);
      read.onsuccess = () => conversations.put({ ...conversation, ...read.result, ...changes });
      for (const message of messages) stored.put(message);
    }, [conversation], messages);
    this.channel?.postMessage(conversation.id);
  }

  /** Write messages as the page is left, when nothing can be waited for. */
  leave(messages) {
    try {
      const transaction = this.database.transaction(MESSAGES, "readwrite");
      for (const message of messages) transaction.objectStore(MESSAGES).put(message);
      transaction.commit();
    } catch {
      // There is no database, and nobody to tell.
    }
  }

  /** Delete messages of a conversation. */
  async removeMessages(conversation, messages) {
    for (const { id } of messages) this.unwritten[MESSAGES].delete(id);
    await this.#write((_, stored) => messages.forEach(({ id }) => stored.delete(id)));
    this.channel?.postMessage(conversation.id);
  }

  /** Delete a conversation; returns it with its messages, for `restore`. */
  async remove(conversation) {
    const messages = await this.messages(conversation.id);
    const removed = { conversation: (await this.conversation(conversation.id)) ?? conversation, messages };
    this.unwritten[CONVERSATIONS].delete(conversation.id);
    await this.#write((conversations, stored) => {
      conversations.delete(conversation.id);
      const keys = stored.index("conversation").getAllKeys(conversation.id);
      keys.onsuccess = () => keys.result.forEach((key) => stored.delete(key));
    });
    for (const { id } of messages) this.unwritten[MESSAGES].delete(id);
    this.channel?.postMessage(conversation.id);
    return removed;
  }

  /** Write a conversation with all its messages. */
  restore({ conversation, messages }) {
    return this.save(conversation, {}, messages);
  }

  /**
   * The first text of each conversation that contains all words, by the conversation's id.
   * @param {string[]} words  In lower case.
   * @param {AbortSignal} signal  Ends the search.
   */
  async search(words, signal) {
    const found = new Map();
    const look = (record) => {
      const { conversation, content } = messageOf(record);
      const text = content.toLowerCase();
      if (!found.has(conversation) && words.every((word) => text.includes(word))) found.set(conversation, content);
    };
    const { [MESSAGES]: unwritten } = this.unwritten;
    unwritten.forEach(look);
    let batch;
    let after = "";
    do {
      const range = IDBKeyRange.lowerBound(after, true);
      batch = await this.#stored(MESSAGES, (store) => store.getAll(range, BATCH));
      batch.filter(({ id }) => !unwritten.has(id)).forEach(look);
      after = batch.at(-1)?.id;
    } while (batch.length === BATCH && !signal.aborted);
    return found;
  }

  async #open() {
    try {
      const opening = indexedDB.open(NAME, 1);
      opening.onupgradeneeded = () => {
        opening.result.createObjectStore(CONVERSATIONS, { keyPath: "id" });
        const messages = opening.result.createObjectStore(MESSAGES, { keyPath: "id" });
        messages.createIndex("conversation", "conversation");
      };
      const late = new Promise((_, reject) => {
        setTimeout(() => reject(new DOMException("The database does not open.", "TimeoutError")), PATIENCE);
      });
      this.database = await Promise.race([settled(opening), late]);
      this.database.onversionchange = () => this.database.close();
    } catch (error) {
      this.#fail(error);
    }
  }

  async #read(name, request) {
    const found = await this.#stored(name, request);
    const { [name]: unwritten } = this.unwritten;
    return [...found.filter((record) => !unwritten.has(record.id)), ...structuredClone([...unwritten.values()])];
  }

  async #stored(name, request) {
    await this.opening;
    try {
      return this.database ? await settled(request(this.database.transaction(name).objectStore(name))) : [];
    } catch (error) {
      this.#fail(error);
      return [];
    }
  }

  async #write(change, conversations = [], messages = []) {
    await this.opening;
    if (this.database !== null && (await this.#commit(change))) return;
    for (const one of conversations) this.unwritten[CONVERSATIONS].set(one.id, structuredClone(one));
    for (const one of messages) this.unwritten[MESSAGES].set(one.id, structuredClone(one));
  }

  async #commit(change) {
    try {
      const transaction = this.database.transaction([CONVERSATIONS, MESSAGES], "readwrite");
      try {
        change(transaction.objectStore(CONVERSATIONS), transaction.objectStore(MESSAGES));
      } catch (error) {
        transaction.abort();
        throw error;
      }
      await new Promise((resolve, reject) => {
        transaction.oncomplete = resolve;
        transaction.onabort = () => reject(transaction.error);
      });
      return true;
    } catch (error) {
      this.#fail(error);
      return false;
    }
  }

  #fail(error) {
    const name = error?.name ?? "unknown error";
    const rest = "conversations are lost when the page is left.";
    this.report(REASONS[name] ?? `The browser does not let this page store anything (${name}): ${rest}`);
    this.report = () => {};
  }
}

// Browsers that block storage refuse this too.
function channel() {
  try {
    return new BroadcastChannel(NAME);
  } catch {
    return null;
  }
}

function settled(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}
