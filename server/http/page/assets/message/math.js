// Mathematics in Markdown: its source is kept as it is, since Markdown would take its backslashes and underscores away.

// Longer formulas are text; the search for their ends would otherwise take quadratic time.
const LONGEST = 2000;

/** A plugin of markdown-it; makes tokens of the types `math_inline` and `math_block`. */
export function math(markdown) {
  markdown.inline.ruler.before("escape", "math_inline", inline);
  markdown.block.ruler.after("fence", "math_block", block, { alt: ["paragraph", "reference", "blockquote", "list"] });
}

const CLOSES = { "\\(": "\\)", "\\[": "\\]", $$: "$$" };

function inline(state, silent) {
  const { src, pos } = state;
  const first = src[pos];
  if (first !== "\\" && first !== "$") return false;
  const window = src.slice(pos, Math.min(pos + LONGEST, state.posMax));
  const close = CLOSES[window.slice(0, 2)];
  const at = close === undefined ? -1 : window.indexOf(close, 2);
  // As in Pandoc: no space inside of single dollars, and no digit after them, or prices would be formulas.
  const length = at > 2 ? at + 2 : /^\$(?!\s)(?:[^$\\\n]|\\.)*?(?<![\s$])\$(?!\d)/.exec(window)?.[0].length;
  if (!length || (first === "\\" && at <= 2)) return false;
  if (!silent) state.push("math_inline", "code", 0).content = window.slice(0, length);
  state.pos += length;
  return true;
}

function block(state, startLine, endLine, silent) {
  const lineOf = (line) => state.src.slice(state.bMarks[line] + state.tShift[line], state.eMarks[line]);
  if (state.sCount[startLine] - state.blkIndent >= 4) return false;
  const first = lineOf(startLine).trimEnd();
  const open = first.slice(0, 2);
  const close = open === "\\(" ? undefined : CLOSES[open];
  if (close === undefined) return false;
  let line = startLine;
  if (!first.endsWith(close) || first.length < 4) {
    if (first.slice(2).includes(close)) return false;
    do {
      line += 1;
      const outside = line >= endLine || (state.sCount[line] < state.blkIndent && !state.isEmpty(line));
      if (outside || line - startLine > 200) return false;
    } while (!lineOf(line).trimEnd().endsWith(close));
  }
  if (silent) return true;
  const token = state.push("math_block", "code", 0);
  token.block = true;
  token.map = [startLine, line + 1];
  token.content = state.getLines(startLine, line + 1, state.blkIndent, false).trim();
  state.line = line + 1;
  return true;
}
