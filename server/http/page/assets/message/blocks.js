// Makes elements of the tokens of Markdown. What is not in these tables is never created.

import { codeBlock } from "./code.js";
import { element } from "../dom.js";
import { safeAddress } from "./links.js";
import { visible } from "./visible.js";

const BLOCKS = {
  paragraph: "p", blockquote: "blockquote", bullet_list: "ul", ordered_list: "ol", list_item: "li",
  thead: "thead", tbody: "tbody", tr: "tr",
};
const SPANS = { em: "em", strong: "strong", s: "s" };
const ALIGNMENTS = new Set(["left", "center", "right"]);
// The headings of the page's own sections have the levels 1 to 3.
const PAGE_LEVEL = 3;

/** Divide tokens into those of each block that is not within another; each becomes one element. */
export function topBlocks(tokens) {
  const groups = [];
  let begin = 0;
  for (const [i, token] of tokens.entries()) {
    if (token.level === 0 && token.nesting <= 0) {
      groups.push(tokens.slice(begin, i + 1));
      begin = i + 1;
    }
  }
  return groups;
}

/**
 * Make the elements of blocks.
 * @param {object[]} tokens
 * @param {{level: number}} outline  The level of the heading before, which is changed: none is skipped.
 * @returns {HTMLElement[]}
 */
export function render(tokens, outline) {
  const root = element("div");
  const open = [root];
  for (const token of tokens) {
    const parent = open.at(-1);
    if (token.nesting < 0) {
      if (!token.hidden) open.pop();
    } else if (token.type === "inline") {
      const content = spans(token.children);
      const box = parent.tagName === "LI" || parent.parentElement?.tagName === "LI" ? taskBox(content, parent) : null;
      parent.append(...(box ? [box] : []), ...content);
    } else if (token.nesting > 0) {
      // Paragraphs of a tight list are hidden: their text stands in the item itself.
      if (!token.hidden) open.push(begin(token, parent, outline));
    } else {
      parent.append(single(token));
    }
  }
  return [...root.children];
}

function begin(token, parent, outline) {
  const name = token.type.slice(0, -"_open".length);
  let node;
  if (name === "heading") {
    const level = Number(token.tag[1]);
    outline.level = Math.min(PAGE_LEVEL + level, outline.level + 1, 6);
    node = element(`h${outline.level}`, { class: `heading-${level}` });
  } else if (name === "table") {
    node = element("table");
    // Focusable, because a wide table scrolls sideways.
    parent.append(element("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": "Table" }, node));
    return node;
  } else if (name === "th" || name === "td") {
    const [, side] = /^text-align:(\w+)$/.exec(token.attrGet("style") ?? "") ?? [];
    node = element(name, { class: ALIGNMENTS.has(side) && `align-${side}`, scope: name === "th" && "col" });
  } else {
    node = element(BLOCKS[name] ?? "div");
    const start = Number(token.attrGet("start"));
    if (name === "ordered_list" && Number.isSafeInteger(start) && token.attrGet("start") !== null) node.setAttribute("start", start);
  }
  parent.append(node);
  return node;
}

function single(token) {
  switch (token.type) {
    case "hr":
      return element("hr");
    case "fence":
      return codeBlock(token.content, token.info);
    case "code_block":
      return codeBlock(token.content, "");
    case "math_block":
      return element(
        "div",
        { class: "math scroll", tabindex: 0, role: "group", "aria-label": "Formula" },
        element("code", {}, ...visible(token.content, true)),
      );
    default:
      return element("p", {}, ...visible(token.content));
  }
}

function spans(tokens) {
  const root = element("span");
  const open = [root];
  for (const token of tokens) {
    const parent = open.at(-1);
    if (token.nesting < 0) open.pop();
    else if (token.nesting > 0) {
      const node = token.type === "link_open" ? link(token.attrGet("href")) : element(SPANS[token.type.slice(0, -5)] ?? "span");
      parent.append(node);
      open.push(node);
    } else parent.append(...span(token, open.some((node) => node.tagName === "A")));
  }
  return [...root.childNodes];
}

function span(token, linked) {
  switch (token.type) {
    case "softbreak": // as in comments on GitHub: models end the lines of poems and addresses so
    case "hardbreak":
      return [element("br")];
    case "code_inline":
      return [element("code", {}, ...visible(token.content, true))];
    case "math_inline":
      return [element("code", { class: "math" }, ...visible(token.content, true))];
    case "image":
      return [image(token, linked)];
    default:
      return visible(token.content, linked);
  }
}

function link(address) {
  const href = safeAddress(address ?? "");
  if (href === null) return element("span");
  return element("a", { href, title: href, target: "_blank", rel: "noopener noreferrer nofollow" });
}

// No image is loaded, since that would tell another host who reads the message, or carry a part of it there.
function image(token, linked) {
  const text = `Image: ${plain(token.children) || "no description"}`;
  const node = linked ? element("span") : link(token.attrGet("src"));
  node.classList.add("image");
  node.append(...visible(text, true));
  return node;
}

function plain(tokens) {
  return (tokens ?? []).map((token) => (token.type === "image" ? plain(token.children) : token.content)).join("");
}

/** The box of a task at the beginning of an item; its text loses the brackets. Null if there is none. */
function taskBox(content, parent) {
  const item = parent.closest("li");
  const match = /^\[([ xX])\](?:\s|$)/.exec(content[0]?.nodeType === Node.TEXT_NODE ? content[0].data : "");
  if (match === null || item.textContent !== "") return null;
  content[0].data = content[0].data.slice(match[0].length);
  item.classList.add("task");
  const done = match[1] !== " ";
  return element("span", { class: "box", role: "img", "aria-label": done ? "done" : "to do" }, done ? "☑" : "☐");
}
