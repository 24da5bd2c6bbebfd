// Shows calls of tools and their results.

import { blockOf, codeBlock, colour } from "./code.js";
import { element } from "../dom.js";
import { beginsAsJson, indent, isJson } from "./json.js";

/** The calls of one message. */
export class CallsView {
  /** @param {HTMLElement} node  An element without children. */
  constructor(node) {
    this.node = node;
    this.items = [];
  }

  /**
   * Show calls.
   * @param {{id: ?string, name: string, arguments: string}[]} calls
   * @param {boolean} final  Whether the arguments of the last one are complete.
   */
  update(calls, final) {
    for (const [i, call] of calls.entries()) {
      const complete = final || i < calls.length - 1;
      const block = argumentsOf(call, complete);
      const item = this.items[i];
      if (item === undefined) this.items.push(this.#add(call, block));
      else {
        if (item.name.textContent !== call.name) item.name.textContent = call.name;
        if (!blockOf(item.block).update(blockOf(block))) {
          item.block.replaceWith(block);
          item.block = block;
        }
      }
    }
    while (this.items.length > calls.length) this.items.pop().node.remove();
    colour(this.node, final);
  }

  #add(call, block) {
    const name = element("code", {}, call.name);
    const node = details("call", ["Tool call ", name], block);
    node.open = true;
    this.node.append(node);
    return { node, name, block };
  }
}

/** The element of a tool's result. */
export function result(text, name) {
  const title = name ? ["Result of ", element("code", {}, name)] : ["Result of a tool"];
  const json = isJson(text);
  const node = details("result", title, codeBlock(json ? indent(text) : text, json ? "json" : ""));
  node.open = text.length < 2000;
  return node;
}

function details(kind, title, content) {
  return element("details", { class: `tool ${kind}` }, element("summary", {}, ...title), content);
}

function argumentsOf({ arguments: text }, complete) {
  const json = complete ? isJson(text) : beginsAsJson(text) || /^\s*\{?\s*$/.test(text);
  return json ? codeBlock(indent(text), "json") : codeBlock(text, "");
}
