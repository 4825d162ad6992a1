/* The only place that creates elements. Data becomes text, never markup. */

const SVG = "http://www.w3.org/2000/svg";

/** An HTML element. `onclick` and the like are listeners; null and false attributes are left out. */
export function el(name, attributes = {}, ...children) {
  return furnish(document.createElement(name), attributes, children);
}

/** An SVG element; see `el`. */
export function svg(name, attributes = {}, ...children) {
  return furnish(document.createElementNS(SVG, name), attributes, children);
}

export function byId(id) {
  return document.getElementById(id);
}

/** Sets text only where it differs, so that selections stay and screen readers do not repeat it. */
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** Sets an attribute only where it differs; null removes it. */
export function setAttribute(node, name, value) {
  if (value === null || value === false) node.removeAttribute(name);
  else if (node.getAttribute(name) !== String(value)) node.setAttribute(name, value);
}

/** Text with `commands` in backticks, as text and code elements. */
export function marked(text) {
  return text.split("`").map((piece, at) => (at % 2 ? el("code", {}, piece) : piece));
}

const nodesByKey = new WeakMap();

/**
 * Makes the children of `parent` follow `items`, one for one. A child whose key remains is updated in place, so that
 * focus, scrolling and selection survive; it is moved only when its position has changed.
 */
export function keyed(parent, items, keyOf, make, update = () => {}) {
  const known = nodesByKey.get(parent) ?? new Map();
  nodesByKey.set(parent, known);
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
