// JSON as people read it: indented, with every value as it was written.

// Deeper or longer JSON is nothing that people read: its indentation would be most of the text.
const DEEPEST = 100;
const LONGEST = 200_000;

/** Whether a text is a JSON object or array that can be shown as such. */
export function isJson(text) {
  if (text.length > LONGEST || !/^\s*[[{]/.test(text)) return false;
  try {
    JSON.parse(text);
    return true;
  } catch {
    return false;
  }
}

/** Whether the beginning of a text can only be that of a JSON document, as far as one can tell. */
export function beginsAsJson(text) {
  return text.length <= LONGEST && /^\s*(\{\s*"|\[\s*(\{\s*"|"))/.test(text);
}

/**
 * Indent JSON. `JSON.parse` would round long numbers, and lose the order and repetition of keys.
 * @param {string} text  A document, or the beginning of one.
 * @returns {string} The text itself if it is nested too deeply.
 */
export function indent(text) {
  let out = "";
  let level = 0;
  const line = () => `\n${"  ".repeat(level)}`;
  const tokens = /"(?:[^"\\]|\\[^])*(?:"|\\?$)|[[{]\s*[\]}]|[[\]{},:]|[^\s[\]{},:"]+/g;
  for (const [token] of text.matchAll(tokens)) {
    if (token === "{" || token === "[") {
      level += 1;
      if (level > DEEPEST) return text;
      out += token + line();
    } else if (token === "}" || token === "]") {
      level = Math.max(0, level - 1);
      out += line() + token;
    } else if (token === ",") out += token + line();
    else if (token === ":") out += ": ";
    else if (token.length > 1 && /^[[{]/.test(token)) out += token[0] + token.at(-1);
    else out += token;
  }
  return out.trimEnd();
}
