// Runs one request of a view: buttons, tokens, measurements, warnings and errors.

import { ApiError, warningsOf } from "./api.js";
import { accountingOf, Stopwatch } from "./speed.js";
import { define, element } from "./dom.js";
import { askForKey } from "./settings.js";

/** The state of a view's requests; at most one runs. */
export class Run {
  /** @param {HTMLElement} view  The tab panel, with the elements of the classes used here. */
  constructor(view) {
    this.error = view.querySelector(".error");
    this.warnings = view.querySelector(".warnings");
    this.measures = view.querySelector(".measures");
    this.accounting = view.querySelector(".accounting");
    this.start = view.querySelector(".primary");
    this.stopButton = view.querySelector(".stop");
    this.stopButton.addEventListener("click", () => this.stop());
    this.status = view.querySelector(".status");
    this.abort = null;
    // How the last request ended: what the stream said, null if it broke off; whether the user ended it.
    this.end = null;
    this.stopped = false;
  }

  get busy() {
    return this.abort !== null;
  }

  /** End the request: the connection is closed, and the server aborts it. */
  stop() {
    this.abort?.abort();
  }

  /**
   * Send a request and show its tokens.
   * @param {function(string, AbortSignal)} open  Sends a body; see completion.js.
   * @param {string} body
   * @param {TokenView} output
   * @returns {Promise<?ApiError>} The error, which is shown already; null if there is none.
   */
  async run(open, body, output) {
    this.abort = new AbortController();
    this.#begin();
    const watch = new Stopwatch();
    const show = setInterval(() => define(this.measures, watch.measures("generating")), 200);
    let outcome = "failed";
    let failure = null;
    try {
      const { response, parts } = await open(body, this.abort.signal);
      watch.respond(response);
      this.#warn(warningsOf(response));
      let end = null;
      for await (const part of parts) {
        if (part.token) {
          watch.token();
          output.append(part.token);
        }
        if (part.warnings?.length) this.#warn(part.warnings);
        end = part.end ?? end;
      }
      if (end === null) throw new ApiError("The connection ended before the text was complete.");
      watch.end(end);
      outcome = end.reason ?? "finished";
      this.end = end;
      this.#account(accountingOf(response, end));
    } catch (error) {
      if (this.abort.signal.aborted) {
        outcome = "stopped";
        this.stopped = true;
      } else {
        failure = error instanceof ApiError ? error : new ApiError(`The connection broke off: ${error.message}`);
        this.show(failure);
      }
    } finally {
      clearInterval(show);
      output.flush();
      define(this.measures, failure && !watch.tokens ? [] : watch.measures(outcome));
      this.status.textContent = `${outcome}, ${watch.tokens} tokens`;
      this.#end();
    }
    return failure;
  }

  /** Show an error with its status. */
  show(error) {
    const details = [error.status && `status ${error.status}`, error.requestId && `request ${error.requestId}`];
    const known = details.filter(Boolean).join(", ");
    this.error.replaceChildren(error.message, ...(known ? [element("small", {}, known)] : []));
    if (error.status === 401) askForKey();
  }

  #begin() {
    this.end = null;
    this.stopped = false;
    this.start.disabled = true;
    this.stopButton.disabled = false;
    this.status.textContent = "generating";
    this.error.replaceChildren();
    this.warnings.replaceChildren();
    this.accounting.hidden = true;
  }

  #end() {
    this.abort = null;
    this.start.disabled = false;
    // A disabled button would lose the focus.
    if (document.activeElement === this.stopButton) this.start.focus();
    this.stopButton.disabled = true;
  }

  #warn(warnings) {
    this.warnings.replaceChildren(...warnings.map((text) => element("li", {}, text)));
  }

  #account(pairs) {
    this.accounting.hidden = pairs.length === 0;
    define(this.accounting.querySelector("dl"), pairs);
  }
}
