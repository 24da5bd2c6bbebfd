// An open conversation: its messages, the branch that is shown, and their way into the store.

import { withFiles } from "./attachments.js";
import { newConversation, newMessage, titleOf, Tree } from "./tree.js";

// A message that is being written is saved this often, in milliseconds; one that was not for this long was cut off.
export const SAVE_INTERVAL = 400;
const ABANDONED = 5000;

/** Defaults of the settings in the chat: as long a reply, and as the model's makers intend it. */
export const DEFAULTS = { "max-tokens": "", temperature: "" };

/** One conversation. A new one is stored with its first message. */
export class Session {
  constructor(store, conversation = newConversation(), messages = []) {
    this.store = store;
    this.conversation = conversation;
    this.tree = new Tree(messages);
  }

  /** Open a stored conversation; null if there is none with this id. */
  static async open(store, id) {
    const [conversation, messages] = await Promise.all([store.conversation(id), store.messages(id)]);
    return conversation && new Session(store, conversation, messages);
  }

  /** Read again what another tab wrote; the branch shown stays, unless it was continued. Returns whether it still exists. */
  async reread() {
    const read = await Session.open(this.store, this.conversation.id);
    if (read === null) return false;
    const { head } = this.conversation;
    const follows = read.path.some((message) => message.id === head);
    this.conversation = follows || !read.tree.get(head) ? read.conversation : { ...read.conversation, head };
    this.tree = read.tree;
    return true;
  }

  get isNew() {
    return this.tree.messages.size === 0;
  }

  /** The messages shown. */
  get path() {
    return this.tree.path(this.conversation.head);
  }

  /** The messages of a path that are sent: without the oldest turns, if these are left out ("next": all there are). */
  sent(path = this.path) {
    const { from } = this.conversation;
    if (from === "next") return [];
    const first = path.findIndex((message) => message.id === from);
    return path.slice(Math.max(first, 0));
  }

  /** Whether a message is being written, here or in another tab. */
  isWriting(message) {
    return message.writing !== undefined && Date.now() - message.writing < ABANDONED;
  }

  /** Add a message after another one and show it. */
  add(parent, fields, changes = {}) {
    const message = newMessage(this.conversation, parent, fields);
    this.tree.add(message);
    if (this.conversation.title === "" && message.role === "user") {
      changes.title = titleOf(message.content || message.files?.[0]?.name || "");
    }
    this.save([message], { ...changes, head: message.id, updated: message.created });
    return message;
  }

  /** Write messages and changes of the conversation. */
  save(messages = [], changes = {}) {
    return this.store.save(this.conversation, changes, messages);
  }

  /** Remove messages to which there was no answer; `head` is shown from now on. The promise is that of the store. */
  withdraw(messages, head) {
    for (const { id } of messages) this.tree.remove(id);
    if (this.isNew) {
      Object.assign(this.conversation, { title: "", head: null });
      return this.store.remove(this.conversation);
    }
    this.store.removeMessages(this.conversation, messages);
    return this.save([], { head: head?.id ?? null });
  }

  /** Show the branch that goes through a message. */
  choose(message) {
    return this.save([], { head: this.tree.leaf(message.id).id });
  }
}

/** The messages of a request, in the form of the API. */
export function toRequest(messages, system) {
  const first = system?.trim() ? [{ role: "system", content: system }] : [];
  return [...first, ...messages.map(turn)];
}

function turn(message) {
  const { role, reasoning, toolCalls = [], toolCallId, name } = message;
  return {
    role,
    content: withFiles(message),
    reasoning_content: reasoning || undefined,
    tool_calls: toolCalls.length
      ? toolCalls.map((call) => ({ id: call.id, type: "function", function: { name: call.name, arguments: call.arguments } }))
      : undefined,
    tool_call_id: toolCallId,
    name,
  };
}
