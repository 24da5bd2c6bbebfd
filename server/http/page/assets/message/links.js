// Which addresses a message may link to.

const PROTOCOLS = new Set(["http:", "https:", "mailto:"]);

/** The address in its normal form if a message may link to it, else null. Relative addresses are none. */
export function safeAddress(text) {
  // The parser of addresses drops these, so the reader would see another address.
  if (/[\u0000-\u001f\u007f]/.test(text)) return null;
  let url;
  try {
    url = new URL(text);
  } catch {
    return null;
  }
  return PROTOCOLS.has(url.protocol) ? url.href : null;
}
