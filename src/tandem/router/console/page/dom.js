// Creates and changes elements. Strings are always inserted as text, because node names and errors are untrusted.

const SVG = "http://www.w3.org/2000/svg";

/** Return the element with an id. */
export const byId = (id) => document.getElementById(id);

/** Create an element; `attributes` that are functions become listeners of the event with their name. */
export function el(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** Create an SVG element. */
export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") element.addEventListener(name, value);
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null));
  return element;
}

/** Set an element's text, if it differs. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Set an attribute, if it differs. */
export function set(element, name, value) {
  if (element.getAttribute(name) !== String(value)) element.setAttribute(name, value);
}

/**
 * Make the children of `parent` match `items`, in order. Children with the same key are kept, and so is their
 * focus. `make(item)` returns a new child, and `update(child, item)` updates it.
 */
export function keyed(parent, items, keyOf, make, update) {
  const known = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  let place = parent.firstElementChild;
  for (const item of items) {
    const key = String(keyOf(item));
    let child = known.get(key);
    known.delete(key);
    if (!child) {
      child = make(item);
      child.dataset.key = key;
    }
    update(child, item);
    if (child === place) place = place.nextElementSibling;
    else parent.insertBefore(child, place);
  }
  for (const child of known.values()) child.remove();
}

/**
 * Make the arrow keys move within a list, in which Tab reaches only one option.
 * `choose(key)` is called with the key of the chosen option.
 */
export function listKeys(list, choose, sideways = () => null) {
  const options = () => [...list.querySelectorAll("[role=option]")];
  list.addEventListener("keydown", (event) => {
    const all = options();
    const at = all.indexOf(document.activeElement);
    const to = { ArrowDown: all[at + 1], ArrowUp: all[at - 1], Home: all[0], End: all.at(-1),
      ArrowLeft: sideways(-1, at), ArrowRight: sideways(1, at) }[event.key];
    if (to) to.focus();
    else if (event.key === "Enter" || event.key === " ") choose(document.activeElement.dataset.key);
    else if (!event.key.startsWith("Arrow")) return;
    event.preventDefault();
  });
  list.addEventListener("focusin", (event) => {
    for (const option of options()) option.tabIndex = option === event.target ? 0 : -1;
  });
  list.addEventListener("click", (event) => {
    const option = event.target.closest("[role=option]");
    if (option) choose(option.dataset.key);
  });
}

/** Make the first option of a list reachable by Tab, if no other option is. */
export function oneTabStop(list) {
  const options = [...list.querySelectorAll("[role=option]")];
  if (options.length && !options.some((option) => option.tabIndex === 0)) options[0].tabIndex = 0;
}
