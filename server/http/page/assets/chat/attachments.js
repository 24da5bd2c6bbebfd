// Text files that are sent with a message: reading them, and their place in the text that the model gets.

export const MOST_BYTES = 512 * 1024;
const UNITS = ["KiB", "MiB", "GiB", "TiB"];

/** Read a file as text; throws an Error whose message names the file. */
export async function readFile(file) {
  if (file.size > MOST_BYTES) {
    throw new Error(`${file.name} has ${sizeOf(file.size)}; a file may have at most ${sizeOf(MOST_BYTES)}.`);
  }
  let bytes;
  try {
    bytes = new Uint8Array(await file.arrayBuffer());
  } catch {
    throw new Error(`${file.name} cannot be read; folders cannot be attached.`);
  }
  return { name: nameOf(file), size: file.size, text: decode(bytes, file.name) };
}

// A name cannot hide its end: without control characters, and those that turn text around or have no width.
function nameOf(file) {
  return file.name.replaceAll(/[\p{Cc}\p{Cf}\p{Zl}\p{Zp}]+/gu, " ").trim() || "unnamed";
}

/** A number of bytes for people. */
export function sizeOf(bytes) {
  if (bytes < 1024) return `${bytes} bytes`;
  let size = bytes / 1024;
  let unit = 0;
  for (; size >= 999.5 && unit < UNITS.length - 1; unit += 1) size /= 1024;
  return `${Number(size.toPrecision(3))} ${UNITS[unit]}`;
}

/** The text of a message that the model gets: its files as fenced blocks, then what was written. */
export function withFiles({ content, files = [] }) {
  return [...files.map(block), content].filter(Boolean).join("\n\n");
}

function block({ name, text }) {
  // Longer than any run of backticks in the text, so that the text cannot end the block.
  const runs = text.match(/`{3,}/g) ?? [];
  const fence = "`".repeat(runs.reduce((longest, run) => Math.max(longest, run.length + 1), 3));
  const suffix = /\.(\w{1,12})$/.exec(name)?.[1].toLowerCase() ?? "";
  const title = name.replaceAll(/[\s`]+/g, " ").trim();
  return `\`${title}\`:\n\n${fence}${suffix}\n${text.replace(/\n$/, "")}\n${fence}`;
}

function decode(bytes, name) {
  const mark = (bytes[0] << 8) | bytes[1];
  const encoding = { 0xfffe: "utf-16le", 0xfeff: "utf-16be" }[mark] ?? "utf-8";
  let text;
  try {
    text = new TextDecoder(encoding, { fatal: true }).decode(bytes);
  } catch {
    text = "\0";
  }
  if (text.includes("\0")) throw new Error(`${name} is not a text file (UTF-8), so it was not attached.`);
  return text.replaceAll("\r\n", "\n");
}
