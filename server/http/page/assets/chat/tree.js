// The data of a conversation: its messages as a tree, each with the id of its parent.

let last = 0;

/** A new id, unique in all browsers. `crypto.randomUUID` does not exist on plain HTTP. */
export function newId() {
  const bytes = crypto.getRandomValues(new Uint8Array(12));
  return [...bytes].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}

/** The time in milliseconds since 1970, later than that of any call before. */
export function now() {
  last = Math.max(Date.now(), last + 1);
  return last;
}

/** A conversation without messages; `settings` are those of its requests, by the id of the control. */
export function newConversation(settings = {}) {
  const time = now();
  return { id: newId(), title: "", created: time, updated: time, settings, head: null, from: null };
}

/** A message; `fields` are its role and content, and what else is known of it. */
export function newMessage(conversation, parent, fields) {
  return { id: newId(), conversation: conversation.id, parent: parent?.id ?? null, created: now(), ...fields };
}

/** The title of a conversation that begins with a text: its first words. */
export function titleOf(text, most = 60) {
  const line = text.trim().split("\n", 1)[0].replaceAll(/\s+/g, " ");
  if (line.length <= most) return line;
  const cut = line.slice(0, most);
  return `${cut.slice(0, Math.max(cut.lastIndexOf(" "), most - 20)).trimEnd()}…`;
}

/** The messages of a conversation. The children of a message are its answers, or edited forms of what follows it. */
export class Tree {
  /** @param {object[]} messages  In any order. */
  constructor(messages = []) {
    this.messages = new Map();
    this.following = new Map(); // The messages that follow one, by its id.
    for (const message of withoutCycles(messages)) this.add(message);
  }

  add(message) {
    this.messages.set(message.id, message);
    const others = this.following.get(message.parent) ?? [];
    others.push(message);
    others.sort((a, b) => a.created - b.created || (a.id < b.id ? -1 : 1));
    this.following.set(message.parent, others);
  }

  get(id) {
    return this.messages.get(id) ?? null;
  }

  /** Remove a message and all that follow it; returns them. */
  remove(id) {
    const gone = [...this.children(id)].flatMap((child) => this.remove(child.id));
    const message = this.get(id);
    if (message === null) return gone;
    this.messages.delete(id);
    this.following.set(message.parent, this.children(message.parent).filter((other) => other !== message));
    return [...gone, message];
  }

  /** The messages that follow one directly (null: that begin the conversation), oldest first. */
  children(id) {
    return this.following.get(id) ?? [];
  }

  /** A message and the others in its place, oldest first. */
  siblings(message) {
    return this.children(message.parent);
  }

  /** The messages from the first to the one with this id; the newest branch if there is none with it. */
  path(id) {
    const found = [];
    for (let at = this.get(id) ?? this.leaf(null); at !== null; at = this.get(at.parent)) found.unshift(at);
    return found;
  }

  /** The last message of the newest branch below a message; the message itself if none follows. */
  leaf(id) {
    let at = this.get(id);
    for (;;) {
      const next = this.children(at?.id ?? null).at(-1);
      if (next === undefined) return at;
      at = next;
    }
  }
}

// A damaged store may have messages that follow themselves; one of each such circle begins the conversation then.
function withoutCycles(messages) {
  const byId = new Map(messages.map((message) => [message.id, message]));
  const seen = new Map(); // By id, the message from which the walk came that saw it first.
  for (const start of messages) {
    for (let at = start; at !== undefined && !seen.has(at.id); ) {
      seen.set(at.id, start);
      const next = byId.get(at.parent);
      if (next !== undefined && seen.get(next.id) === start) byId.set(at.id, { ...at, parent: null });
      at = next;
    }
  }
  return byId.values();
}
