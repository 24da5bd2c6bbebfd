// Shows Markdown that grows: only its last block is parsed and made again.

import { colour } from "./code.js";
import { element } from "../dom.js";
import { libraries } from "./libraries.js";
import { morph } from "./morph.js";
import { parse, TooComplex } from "./parser.js";
import { render, topBlocks } from "./blocks.js";
import { visible } from "./visible.js";

/** The elements of a Markdown text. */
export class MarkdownView {
  /** @param {HTMLElement} node  An element without children. */
  constructor(node) {
    this.node = node;
    this.clear();
  }

  clear() {
    this.done = 0; // characters whose blocks cannot change any more
    this.kept = 0; // children of the node that show them
    this.outline = { level: 3 };
    this.raw = false;
    this.node.replaceChildren();
  }

  /**
   * Show a text.
   * @param {string} text  Begins with the text of the call before.
   * @param {boolean} final  Whether it is complete.
   */
  update(text, final) {
    if (libraries.MarkdownIt === null) return this.#plain(text);
    if (final) this.raw = false;
    // Definitions of links may stand anywhere, and count once they are complete: then all blocks are made again.
    if (final && text.includes("]:")) this.#restart();
    if (this.raw) return this.#plain(text.slice(this.done));
    try {
      this.#show(text, final);
    } catch (error) {
      if (!(error instanceof TooComplex)) throw error;
      this.raw = true;
      this.#plain(text.slice(this.done));
    }
  }

  #show(whole, final) {
    const rest = whole.slice(this.done);
    const text = final ? rest : withoutPartialFence(rest);
    const groups = topBlocks(parse(text));
    const outline = { ...this.outline };
    const nodes = [];
    for (const [i, group] of groups.entries()) {
      if (i === groups.length - 1 && !final) Object.assign(this.outline, outline);
      nodes.push(...render(group, outline));
    }
    morph(this.node, nodes, this.kept);
    colour(this.node, final);
    if (final || groups.length < 2) return;
    this.kept += groups.length - 1;
    this.done += offsetOfLine(text, groups.at(-1)[0].map[0]);
  }

  #restart() {
    // The elements stay, so that those which are still right are kept.
    this.done = this.kept = 0;
    this.outline = { level: 3 };
  }

  #plain(text) {
    const present = this.node.childNodes[this.kept];
    let block = present?.classList?.contains("plain") ? present : null;
    if (block === null) {
      block = element("div", { class: "plain" });
      morph(this.node, [block], this.kept);
      if (this.raw) {
        const note = "This part is too long or too deeply nested to be formatted: it is shown as text.";
        this.node.append(element("p", { class: "note" }, note));
      }
    }
    block.replaceChildren(...visible(text));
  }
}

// The last line of a text may become the end of a block of code.
function withoutPartialFence(text) {
  const begin = text.lastIndexOf("\n") + 1;
  return /^[ \t>]*(?:`+|~+)$/.test(text.slice(begin)) ? text.slice(0, begin) : text;
}

function offsetOfLine(text, line) {
  const ends = /\r\n?|\n/g;
  for (let i = 0; i < line; i += 1) ends.exec(text);
  return ends.lastIndex;
}
