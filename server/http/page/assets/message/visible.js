// Text as nodes in which no character can hide or turn around what stands beside it.

import { element } from "../dom.js";

// Control characters (escape sequences of terminals begin with one), and those that override the direction of text.
const PROSE = /[\u0000-\u0008\u000b\u000c\u000e-\u001f\u007f-\u009f\u202d\u202e]+/g;
// In code and addresses, also those that have no width or choose a direction.
const EXACT =
  /[\u0000-\u0008\u000b\u000c\u000e-\u001f\u007f-\u009f\u00ad\u061c\u115f\u1160\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\u3164\ufeff\uffa0\ufff9-\ufffb\u{e0000}-\u{e007f}]+/gu;
// Characters of one run that are named, and elements of one text: many would take seconds to lay out.
const NAMED = 8;
const MOST = 1000;
/** Characters of one text that are shown: browsers take 50 to 100 bytes for the layout of each. */
export const LONGEST = 500_000;

/**
 * Divide a text into strings and elements that show the characters which would be invisible.
 * @param {string} text
 * @param {boolean} exact  Whether each character counts, as in code.
 * @returns {(string|Node)[]}
 */
export function visible(text, exact = false) {
  if (text.length > LONGEST) {
    const rest = (text.length - LONGEST).toLocaleString("en");
    const note = element("span", { class: "hidden-character" }, `${rest} more characters, which a copy has`);
    return [...visible(text.slice(0, LONGEST), exact), note];
  }
  const pattern = exact ? EXACT : PROSE;
  if (text.search(pattern) < 0) return [text];
  const parts = [];
  let from = 0;
  for (const { 0: run, index } of text.matchAll(pattern)) {
    if (parts.length > MOST) break;
    if (index > from) parts.push(text.slice(from, index));
    parts.push(element("span", { class: "hidden-character" }, named(run)));
    from = index + run.length;
  }
  if (from < text.length) parts.push(text.slice(from).replace(pattern, named));
  return parts;
}

function named(run) {
  const characters = [...run];
  const rest = characters.length > NAMED ? ` and ${characters.length - NAMED} more` : "";
  return characters.slice(0, NAMED).map(nameOf).join(" ") + rest;
}

function nameOf(character) {
  const code = character.codePointAt(0);
  // Unicode's block "Control Pictures"
  if (code < 0x20) return String.fromCharCode(0x2400 + code);
  return `U+${code.toString(16).toUpperCase().padStart(4, "0")}`;
}
