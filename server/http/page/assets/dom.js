// Builds elements without markup in strings: text from the model or the server never becomes HTML.

/**
 * Create an element.
 * @param {string} tag
 * @param {Object<string, string|number|boolean>} attributes  False leaves an attribute out, true sets it without a value.
 * @param {...(Node|string)} children
 */
export function element(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** Create an SVG element. */
export function graphic(tag, attributes = {}, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

/** Replace the content of a definition list by pairs of term and value. */
export function define(list, pairs) {
  list.replaceChildren(
    ...pairs.map(([term, value]) =>
      element("div", {}, element("dt", {}, term), element("dd", {}, String(value)))),
  );
}

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== false) node.setAttribute(name, value === true ? "" : String(value));
  }
  node.append(...children);
  return node;
}
