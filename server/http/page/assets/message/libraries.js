// The libraries that show messages, loaded when the first message needs them.

let waiting = [];

/** The parser of Markdown and the highlighter of code; null until they are loaded. */
export const libraries = { MarkdownIt: null, lowlight: null };

let begun = false;

/**
 * Load the libraries, unless they are loaded already.
 * @param {function()} then  Called once, when the next one has been loaded. Without them, messages stay plain text.
 */
export function load(then) {
  if (libraries.MarkdownIt && libraries.lowlight) return;
  waiting.push(then);
  if (begun) return;
  begun = true;
  const parts = [import("../vendor/markdown.js"), import("../vendor/highlight.js")];
  for (const part of parts) {
    part.then((module) => {
      Object.assign(libraries, module);
      const calls = waiting;
      waiting = [];
      for (const call of calls) call();
    }, () => {});
  }
  Promise.allSettled(parts).then((results) => {
    waiting = [];
    // A service that was away may be back for the next message.
    if (results.some((result) => result.status === "rejected")) begun = false;
  });
}
