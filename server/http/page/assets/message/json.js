// JSON as people read it: indented, with every value as it was written.

// Deeper levels are indented as this one, since the indentation of each line would otherwise grow without a limit.
const DEEPEST = 40;

/** Whether a text is a JSON object or array. */
export function isJson(text) {
  if (!/^\s*[[{]/.test(text)) return false;
  try {
    JSON.parse(text);
    return true;
  } catch {
    return false;
  }
}

/** Whether the beginning of a text can only be that of a JSON document, as far as one can tell. */
export function beginsAsJson(text) {
  return /^\s*(\{\s*"|\[\s*(\{\s*"|"))/.test(text);
}

/**
 * Indent JSON. `JSON.parse` would round long numbers, and lose the order and repetition of keys.
 * @param {string} text  A document, or the beginning of one.
 */
export function indent(text) {
  let out = "";
  let level = 0;
  const line = () => `\n${"  ".repeat(Math.min(level, DEEPEST))}`;
  const tokens = /"(?:[^"\\]|\\[^])*(?:"|\\?$)|[[{]\s*[\]}]|[[\]{},:]|[^\s[\]{},:"]+/g;
  for (const [token] of text.matchAll(tokens)) {
    if (token === "{" || token === "[") {
      level += 1;
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
