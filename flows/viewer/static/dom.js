// Elements made of text and attributes. Nothing stored ever becomes markup: strings are text nodes.

export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value != null) element.setAttribute(name, value);
  }
  element.append(...children.flat(Infinity).filter((child) => child != null && child !== false));
  return element;
}

// Replace what an element holds; the focus stays on the control with the same address, name or words.
export function refill(element, ...children) {
  const key = (control) => control.getAttribute("href") ?? control.getAttribute("aria-label") ?? control.textContent;
  const held = element.contains(document.activeElement) && key(document.activeElement);
  element.replaceChildren(...children);
  if (held) [...element.querySelectorAll("a, button, select")].find((control) => key(control) === held)?.focus({ preventScroll: true });
}

export const card = (...children) => h("section", { class: "card" }, ...children);
export const problem = (text) => h("p", { class: "problem" }, text);
export const quiet = (text) => h("p", { class: "quiet" }, text);

// A table; columns whose name begins with ">" are numbers, on the right.
export function table(columns, rows) {
  const align = columns.map((name) => (name.startsWith(">") ? { class: "number" } : {}));
  const head = h("tr", {}, columns.map((name, n) => h("th", align[n], name.replace(/^>/, ""))));
  const body = rows.map((row) => h("tr", {}, row.map((cell, n) => h("td", align[n], cell ?? "–"))));
  return h("div", { class: "table" }, h("table", {}, h("thead", {}, head), h("tbody", {}, body)));
}

export function facts(rows) {
  const shown = rows.filter(([, value]) => value != null && value !== "");
  return h("table", { class: "facts" }, shown.map(([name, value]) => h("tr", {}, h("td", {}, name), h("td", {}, value))));
}

export function folded(title, open, ...children) {
  return h("details", { class: "card", open }, h("summary", {}, title), ...children);
}

export function tiles(rows) {
  return h("div", { class: "tiles" }, rows.filter(([, value]) => value != null && value !== "")
    .map(([name, value]) => h("div", { class: "tile" }, h("b", {}, value), h("span", {}, name))));
}

export function command(text) {
  const button = h("button", { onclick: async () => {
    await navigator.clipboard.writeText(text);
    button.textContent = "copied";
    setTimeout(() => { button.textContent = "copy"; }, 1500);
  } }, "copy");
  return h("div", { class: "command" }, h("code", {}, text), button);
}

export function state(name) {
  return h("span", { class: `state ${name}` }, name);
}

export function choice(label, options, chosen, changed) {
  const select = h("select", { onchange: () => changed(select.value) },
    options.map(([value, text]) => h("option", { value, selected: String(value) === String(chosen) }, text)));
  return h("label", {}, label, " ", select);
}

// A slider with its number beside it.
export function slider(label, most, value, changed) {
  const range = h("input", { type: "range", min: 0, max: most, value, "aria-label": label });
  const number = h("input", { type: "number", min: 0, max: most, value, "aria-label": label });
  const set = (from) => {
    const chosen = Math.max(0, Math.min(most, Math.round(Number(from.value) || 0)));
    range.value = number.value = chosen;
    changed(chosen);
  };
  range.addEventListener("input", () => set(range));
  number.addEventListener("change", () => set(number));
  return h("div", { class: "row" }, h("span", { class: "quiet" }, label), range, number, h("span", { class: "quiet" }, `of 0 to ${most}`));
}

// SVG that the server drew of names and numbers: read as SVG, and only shapes, text and links of this page are taken.
const SHAPES = new Set(["svg", "defs", "marker", "path", "rect", "text", "a"]);
export function drawing(text) {
  const found = new DOMParser().parseFromString(text, "image/svg+xml").documentElement;
  for (const element of [found, ...found.querySelectorAll("*")]) {
    if (!SHAPES.has(element.localName)) { element.remove(); continue; }
    for (const { name, value } of [...element.attributes]) {
      if (name.startsWith("on") || (name === "href" && !value.startsWith("#/"))) element.removeAttribute(name);
    }
  }
  return h("div", { class: "graph" }, document.importNode(found, true));
}
