// Blocks of code: the language, a button that copies, and colours.

import { copyOnClick } from "../copy.js";
import { element } from "../dom.js";
import { libraries } from "./libraries.js";
import { visible } from "./visible.js";

// Longer code, or such lines, stay without colours: the expressions of a highlighter may take quadratic time.
const MOST_CHARACTERS = 200_000;
const LONGEST_LINE = 5_000;
// Colours take this part of the time at most while code streams.
const SHARE = 0.05;

const blocks = new WeakMap();

// Complete blocks get their colours when they come near to what the reader sees.
const near = new IntersectionObserver(
  (entries) => {
    for (const { isIntersecting, target } of entries) {
      if (!isIntersecting) continue;
      near.unobserve(target);
      blocks.get(target).colour(true);
    }
  },
  { rootMargin: "600px" },
);

/**
 * Make the element of a block of code, which has no colours yet: see `colour`.
 * @param {string} code
 * @param {string} info  What stands after the mark; its first word is the language.
 */
export function codeBlock(code, info = "") {
  const block = new CodeBlock(code, info);
  blocks.set(block.node, block);
  return block.node;
}

/** The block of code that an element shows, or undefined. */
export function blockOf(node) {
  return blocks.get(node);
}

/**
 * Colour the blocks of code within an element.
 * @param {HTMLElement} root
 * @param {boolean} final  Whether the last block is complete too; the others are.
 */
export function colour(root, final) {
  const nodes = root.querySelectorAll(".code-block");
  for (const [i, node] of nodes.entries()) {
    const block = blocks.get(node);
    if (block.coloured) continue;
    if (final || i < nodes.length - 1) near.observe(node);
    else block.colour(false);
  }
}

class CodeBlock {
  constructor(code, info) {
    this.code = code;
    this.name = /^[\w+#.-]{1,30}/.exec(info.trim())?.[0] ?? "";
    this.shown = []; // what the tree of the highlighter had when it was shown
    this.coloured = false; // or left as it is, because it is too long or of no known language
    this.next = 0; // when colours may be computed again
    this.content = element("code", {}, ...visible(withoutEnd(code), true));
    const label = this.name || "text";
    const button = element("button", { type: "button", class: "copy", "aria-label": `Copy code: ${label}` }, "Copy");
    copyOnClick(button, () => this.code);
    this.node = element(
      "div",
      { class: "code-block" },
      element("div", { class: "bar" }, element("span", { class: "language" }, label), button),
      // Focusable, because a wide block scrolls sideways.
      element("pre", { tabindex: 0, role: "group", "aria-label": `Code: ${label}` }, this.content),
    );
  }

  /** Take over the code of another block, and keep the elements that stay the same; returns whether that was possible. */
  update(other) {
    if (other.name !== this.name) return false;
    if (other.code !== this.code) {
      const added = other.code.startsWith(this.code) ? withoutEnd(other.code).slice(withoutEnd(this.code).length) : null;
      this.code = other.code;
      if (added === null) {
        this.shown = [];
        this.content.replaceChildren(...visible(withoutEnd(this.code), true));
      } else if (added) this.content.append(...visible(added, true));
      this.coloured = false;
    }
    return true;
  }

  /**
   * Colour the code.
   * @param {boolean} complete  If not, colours are computed now and then only, since all of the code is read each time.
   */
  colour(complete) {
    const begin = performance.now();
    if (libraries.lowlight === null || this.coloured || (!complete && begin < this.next)) return;
    this.coloured = true;
    if (!this.#colourable()) return;
    const tree = libraries.lowlight.highlight(this.name.toLowerCase(), withoutEnd(this.code)).children;
    let same = 0;
    while (same < this.shown.length && same < tree.length && equal(this.shown[same], tree[same])) same += 1;
    const before = this.shown.slice(0, same).reduce((sum, one) => sum + one.nodes, 0);
    while (this.content.childNodes.length > before) this.content.lastChild.remove();
    for (const part of tree.slice(same)) {
      const nodes = build(part);
      part.nodes = nodes.length;
      this.content.append(...nodes);
    }
    for (let i = 0; i < same; i += 1) tree[i].nodes = this.shown[i].nodes;
    this.shown = tree;
    const end = performance.now();
    this.next = end + (end - begin) / SHARE;
  }

  #colourable() {
    if (!this.name || this.code.length > MOST_CHARACTERS) return false;
    if (!libraries.lowlight.registered(this.name.toLowerCase())) return false;
    return this.code.split("\n").every((line) => line.length <= LONGEST_LINE);
  }
}

function withoutEnd(code) {
  return code.endsWith("\n") ? code.slice(0, -1) : code;
}

function equal(one, other) {
  if (one.type !== other.type || one.value !== other.value) return false;
  if (one.type === "text") return true;
  const [names, others] = [one.properties.className, other.properties.className];
  if (String(names) !== String(others) || one.children.length !== other.children.length) return false;
  return one.children.every((child, i) => equal(child, other.children[i]));
}

// Only texts and the classes of spans are used; code within code has a span with the name of its language.
function build(part) {
  if (part.type === "text") return visible(part.value, true).map((one) => (typeof one === "string" ? new Text(one) : one));
  const names = (part.properties?.className ?? []).filter((name) => /^hljs-[\w-]+$|^[a-z]+_$/.test(name));
  const children = part.children.flatMap(build);
  return names.length ? [element("span", { class: names.join(" ") }, ...children)] : children;
}
