// Shows the text of a person as it was typed; only fenced code becomes blocks of code.

import { codeBlock } from "./code.js";
import { element } from "../dom.js";
import { visible } from "./visible.js";

/** Make the elements of a text. */
export function verbatim(text) {
  const nodes = [];
  let lines = [];
  const flush = () => {
    const shown = lines.join("\n").replace(/^\n+|\n+$/g, "");
    if (shown) nodes.push(element("div", { class: "plain" }, ...visible(shown)));
    lines = [];
  };
  const all = text.split(/\r\n?|\n/);
  // Lengths of marks that nothing closes from here on, by character: longer marks need not be searched either.
  const unclosed = { "`": Infinity, "~": Infinity };
  for (let i = 0; i < all.length; i += 1) {
    const fence = /^ {0,3}(`{3,}(?=[^`]*$)|~{3,})(.*)$/.exec(all[i]);
    const mark = fence?.[1] ?? "";
    const end = mark.length < (unclosed[mark[0]] ?? 0) ? endOf(all, i + 1, mark) : -1;
    if (end < 0) {
      if (fence !== null) unclosed[mark[0]] = Math.min(unclosed[mark[0]], mark.length);
      lines.push(all[i]);
      continue;
    }
    flush();
    nodes.push(codeBlock(`${all.slice(i + 1, end).join("\n")}\n`, fence[2]));
    i = end;
  }
  flush();
  return nodes;
}

// The line that closes a block; -1 if none does. Then the mark is text.
function endOf(lines, from, mark) {
  const close = new RegExp(`^ {0,3}${mark[0]}{${mark.length},}[ \\t]*$`);
  for (let i = from; i < lines.length; i += 1) if (close.test(lines[i])) return i;
  return -1;
}
