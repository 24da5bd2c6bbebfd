// Divides the output of a model into its reasoning and its answer.

const OPEN = "<think>";
const CLOSE = "</think>";

/**
 * Divide an output whose reasoning stands in tags, as Qwen and DeepSeek write it. The first tag may be part of the
 * prompt; then all before the second is reasoning.
 * @param {string} text  The output so far.
 * @param {boolean} final  Whether it is complete. If not, an end that may become a tag is held back.
 * @returns {{reasoning: string, answer: string, open: boolean}}  `open`: whether the reasoning goes on.
 */
export function divide(text, final = true) {
  const begin = text.trimStart();
  if (!begin.startsWith(OPEN)) {
    if (!final && begin && OPEN.startsWith(begin)) return { reasoning: "", answer: "", open: false };
    const close = /^[ \t]*<\/think>/m.exec(text);
    const before = text.slice(0, close?.index ?? 0);
    // An answer may speak of the tags, or show them in code.
    if (close === null || before.includes(OPEN) || before.split("```").length % 2 === 0) {
      return { reasoning: "", answer: text, open: false };
    }
    return closed(before, text.slice(close.index + close[0].length));
  }
  const inner = begin.slice(OPEN.length);
  const end = inner.indexOf(CLOSE);
  if (end >= 0) return closed(inner.slice(0, end), inner.slice(end + CLOSE.length));
  return { reasoning: strip(final ? inner : withoutPartialTag(inner)), answer: "", open: true };
}

function closed(reasoning, answer) {
  return { reasoning: strip(reasoning).trimEnd(), answer: strip(answer), open: false };
}

function strip(text) {
  return text.replace(/^(?:[ \t]*\r?\n)+/, "");
}

function withoutPartialTag(text) {
  const at = text.lastIndexOf("<");
  return at >= 0 && CLOSE.startsWith(text.slice(at)) ? text.slice(0, at) : text;
}
