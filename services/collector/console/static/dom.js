/* Elements are made here and nowhere else. What the system says becomes text, never markup. */

const SVG = "http://www.w3.org/2000/svg";

/** An HTML element. `onclick` and the like are listeners; null and false attributes are left out. */
export function el(name, attributes = {}, ...children) {
  return furnish(document.createElement(name), attributes, children);
}

/** The same for a drawing. */
export function svg(name, attributes = {}, ...children) {
  return furnish(document.createElementNS(SVG, name), attributes, children);
}

/** The element of the page with that id. */
export function byId(id) {
  return document.getElementById(id);
}

/** Sets text only where it differs, so that selections and screen readers are left in peace. */
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** Sets an attribute only where it differs; null removes it. */
export function setAttribute(node, name, value) {
  if (value === null || value === false) node.removeAttribute(name);
  else if (node.getAttribute(name) !== String(value)) node.setAttribute(name, value);
}

/** Words with `commands` in backticks, as text and code. */
export function marked(words) {
  return words.split("`").map((piece, at) => (at % 2 ? el("code", {}, piece) : piece));
}

const keptNodes = new WeakMap();

/**
 * Makes the children of `parent` follow `items`, one for one. A child whose key stays is kept and updated, so that focus,
 * scrolling and selection survive; it is moved only if its place among the others has changed.
 */
export function keyed(parent, items, keyOf, make, update = () => {}) {
  const known = keptNodes.get(parent) ?? new Map();
  keptNodes.set(parent, known);
  const wanted = new Set(items.map(keyOf));
  for (const [key, node] of known) {
    if (!wanted.has(key)) {
      node.remove();
      known.delete(key);
    }
  }
  let next = parent.firstElementChild;
  for (const item of items) {
    const key = keyOf(item);
    const node = known.get(key) ?? make(item);
    known.set(key, node);
    if (node === next) next = next.nextElementSibling;
    else parent.insertBefore(node, next);
    update(node, item);
  }
}

function furnish(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}
