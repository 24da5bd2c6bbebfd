// Changes elements to others with few changes: what stays keeps its selection, focus and layout.

import { blockOf } from "./code.js";

/** Make the children of a node from a position on equal to others. */
export function morph(parent, wanted, from = 0) {
  let at = from;
  for (const node of wanted) {
    const present = parent.childNodes[at];
    if (present === undefined) parent.append(node);
    else if (!same(present, node)) present.replaceWith(node);
    at += 1;
  }
  while (parent.childNodes.length > at) parent.lastChild.remove();
}

/** Whether a node is, or could be made, equal to another. */
function same(present, node) {
  const block = blockOf(present);
  if (block !== undefined) {
    const other = blockOf(node);
    return other !== undefined && block.update(other);
  }
  if (blockOf(node) !== undefined || present.nodeType !== node.nodeType) return false;
  if (present.nodeType === Node.TEXT_NODE) {
    if (present.data !== node.data) present.data = node.data;
    return true;
  }
  if (present.tagName !== node.tagName || !present.cloneNode(false).isEqualNode(node.cloneNode(false))) return false;
  morph(present, [...node.childNodes]);
  return true;
}
