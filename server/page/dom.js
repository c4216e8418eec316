/* Owns the making of elements. Text becomes text nodes: nothing here or elsewhere in the page parses HTML. */

export const $ = (id) => document.getElementById(id);

/** An element: properties, `data-`, `aria-` and other attributes with a dash, children that are nodes or text. */
export function el(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.includes("-") || name === "role") element.setAttribute(name, value);
    else element[name] = value;
  }
  element.append(...children);
  return element;
}

/** Set an element's text, if it differs: screen readers hear every change. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}
