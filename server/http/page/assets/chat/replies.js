// Gets replies: sends a branch of a conversation, streams the reply into its message, and saves what arrives.

import { encode, open } from "../conversation.js";
import { SAVE_INTERVAL, toRequest } from "./session.js";

const BEAT = 2000; // Milliseconds after which a reply without new tokens is marked as alive.

/** The body of a request for the reply that follows a branch, or goes on where its last message ends. */
export function bodyOf(messages, settings, continues = false) {
  return encode(toRequest(messages, settings.system), { ...settings, continues });
}

/** Replies, of which at most one streams; its conversation need not be the one that is shown. */
export class Replies {
  /**
   * @param {Run} run
   * @param {function()} changed  Called when a reply begins, and when it has ended.
   */
  constructor(run, changed) {
    this.run = run;
    this.changed = changed;
    this.live = null;
    addEventListener("pagehide", () => this.#leave());
  }

  /**
   * Stream a reply into a message, which the list shows already.
   * @param {Session} session
   * @param {object} message  Of the assistant; a reply is added to its text.
   * @param {MessageItem} item
   * @param {object} settings
   * @returns {Promise<{failure: ?ApiError, empty: boolean}>} `empty` if the message has got nothing.
   */
  async stream(session, message, item, settings) {
    const before = { content: message.content, reason: message.reason };
    const continues = message.content !== "";
    const path = session.sent(session.tree.path(message.id));
    const body = bodyOf(continues ? path : path.slice(0, -1), settings, continues);
    this.live = { session, message, item, saved: 0, grown: false };
    message.writing = Date.now();
    item.streams = true;
    this.#save();
    const beat = setInterval(() => this.#saveIfDue(), SAVE_INTERVAL);
    const output = {
      append: (part) => {
        item.view.append(part);
        this.live.grown = true;
      },
      flush: () => item.view.flush(),
    };
    const running = this.run.run(open, body, output);
    this.changed();
    const failure = await running;
    clearInterval(beat);
    this.#collect();
    delete message.writing;
    const empty = message.content === before.content && !message.reasoning && !message.toolCalls?.length;
    const { end, stopped } = this.run;
    message.reason = failure ? "broken" : stopped ? "stopped" : empty && !continues ? "empty" : end?.reason;
    if (empty && continues) message.reason = before.reason;
    if (end) message.usage = { promptTokens: end.promptTokens, tokens: end.tokens };
    item.streams = false;
    this.live = null;
    session.save([message], { updated: Date.now() });
    return { failure, empty: empty && (failure !== null || stopped) && !continues };
  }

  #collect() {
    const { message, item } = this.live;
    const { text, reasoning, reasoningSeconds, toolCalls } = item.view;
    message.content = text;
    if (reasoning) Object.assign(message, { reasoning, reasoningSeconds });
    if (toolCalls.length) message.toolCalls = toolCalls;
  }

  #saveIfDue() {
    if (this.live.grown || Date.now() - this.live.saved >= BEAT) this.#save();
  }

  // A store that is slower than the stream gets the newest state, not a queue of all states.
  async #save() {
    const { live } = this;
    if (live.saves) return;
    live.saves = true;
    live.grown = false;
    this.#collect();
    live.message.writing = live.saved = Date.now();
    await live.session.save([live.message]);
    live.saves = false;
  }

  // What there is of a reply stays when the page is left.
  #leave() {
    if (this.live === null) return;
    this.#collect();
    const { writing, ...message } = this.live.message;
    this.live.session.store.leave([{ ...message, reason: "cut" }]);
  }
}
