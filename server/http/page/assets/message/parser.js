// Parses Markdown within bounds of time and size.

import { libraries } from "./libraries.js";
import { math } from "./math.js";
import { safeAddress } from "./links.js";

// A message of 20,000 tokens takes 20 to 40 ms. What takes longer than this was made to be slow.
const MOST_MILLISECONDS = 200;
const MILLISECONDS_PER_CHARACTER = 0.002;
const MOST_CHARACTERS = 500_000;
// Each becomes an element or a text, and the browser has to lay them out.
const MOST_TOKENS = 60_000;
const DEEPEST = 40;

/** Markdown that would take too long to show. */
export class TooComplex extends Error {}

let parser = null;
let deadline = 0;

/**
 * Parse Markdown.
 * @param {string} text
 * @returns {object[]} Tokens of blocks.
 * @throws {TooComplex}
 */
export function parse(text) {
  if (text.length > MOST_CHARACTERS) throw new TooComplex();
  parser ??= build();
  deadline = performance.now() + MOST_MILLISECONDS + MILLISECONDS_PER_CHARACTER * text.length;
  const tokens = parser.parse(text, {});
  let count = tokens.length;
  for (const token of tokens) count += token.children?.length ?? 0;
  if (count > MOST_TOKENS) throw new TooComplex();
  return tokens;
}

function build() {
  const markdown = new libraries.MarkdownIt({ html: false, linkify: true, maxNesting: 2 * DEEPEST });
  // What looks like a host or a mail address stays text: in answers it often is a file or a version.
  markdown.linkify.set({ fuzzyLink: false, fuzzyEmail: false });
  // A link that is refused stays the text that it is.
  markdown.validateLink = (address) => safeAddress(address) !== null;
  markdown.use(math);
  // Rules that never apply; the parser tries them at each block and each character with a meaning.
  markdown.block.ruler.before("table", "limit", (state) => {
    if (state.level > DEEPEST || performance.now() > deadline) throw new TooComplex();
    return false;
  });
  markdown.inline.ruler.before("text", "limit", () => {
    if (performance.now() > deadline) throw new TooComplex();
    return false;
  });
  return markdown;
}
