// Builds elements. Texts become text nodes only: nothing that comes from a cluster is read as HTML.

const SVG = "http://www.w3.org/2000/svg";

function fill(element, props, children) {
  for (const [name, value] of Object.entries(props ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "value" || name === "checked" || name === "disabled") element[name] = value;
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  append(element, children);
  return element;
}

function append(element, children) {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child instanceof Node ? child : shown(String(child)));
  }
}

export function h(tag, props, ...children) {
  return fill(document.createElement(tag), props, children);
}

export function s(tag, props, ...children) {
  return fill(document.createElementNS(SVG, tag), props, children);
}

// Characters that move or hide other text are shown as their numbers.
const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]/g;

export function shown(text) {
  return text.replace(HIDDEN, (one) => `\\u${one.charCodeAt(0).toString(16).padStart(4, "0")}`);
}

// Replaces the content of an element. What had the focus has it again, if its key is still there.
export function put(element, ...children) {
  const active = document.activeElement;
  const key = element.contains(active) ? active.dataset.key ?? active.getAttribute("href") : null;
  element.replaceChildren();
  append(element, children);
  if (key === null) return;
  for (const one of element.querySelectorAll("a, button, input, select, summary")) {
    if ((one.dataset.key ?? one.getAttribute("href")) === key) {
      one.focus({ preventScroll: true });
      break;
    }
  }
}

// A part of a page that is drawn again only if its data has changed.
export function part(tag, props, draw) {
  const element = h(tag, props);
  let last = null;
  element.update = (data) => {
    const text = JSON.stringify(data ?? null);
    if (text === last) return;
    last = text;
    put(element, draw(data));
  };
  return element;
}

// columns: [{head, cell(row), kind: "name" | "number" | "", sort}]
export function table(caption, columns, rows, options = {}) {
  const sorted = (column) => column.sort && options.sort === column.sort;
  const head = columns.map((column) =>
    h("th", { scope: "col", class: column.kind, "aria-sort": sorted(column) ? "descending" : null },
      column.sort && options.onsort
        ? h("button", { type: "button", "data-key": `sort ${column.sort}`, onclick: () => options.onsort(column.sort) }, column.head)
        : column.head));
  const body = rows.map((row) =>
    h("tr", { class: options.rowClass?.(row) },
      columns.map((column) => h("td", {
        class: [column.kind, column.cellClass?.(row)].filter(Boolean).join(" ") || null,
        "data-head": column.head,
      }, h("span", null, column.cell(row))))));
  return h("div", { class: "scroll", tabindex: options.scroll ? "0" : null, role: options.scroll ? "region" : null, "aria-label": options.scroll ? caption : null },
    h("table", { class: options.stack === false ? null : "stack" },
      h("caption", null, caption),
      h("thead", null, h("tr", null, head)),
      h("tbody", null, body)));
}

export function cards(pairs) {
  return h("dl", { class: "cards" }, pairs.filter(Boolean).map(([name, value, style]) =>
    h("div", { class: "card" }, h("dt", null, name), h("dd", { class: style }, value))));
}

export function notice(error, hint, kind = "error") {
  return h("div", { class: `notice ${kind}` }, h("p", null, error), hint && h("p", { class: "soft" }, hint));
}

export function verdicts(list, total = list.length) {
  if (!list.length) return h("p", { class: "good" }, "Everything is as it should be.");
  return [
    h("ul", { class: "verdicts" }, list.map((one) =>
      h("li", { class: one.severity },
        h("p", null, h("strong", null, `${one.severity}: `), subject(one), " — ", one.reason),
        one.advice && h("p", { class: "soft" }, one.advice),
        one.command && h("p", null, h("code", null, one.command))))),
    total > list.length && h("p", null, `and ${total - list.length} more reasons`),
  ];
}

function subject(one) {
  const page = { journal: journalLink, shard: shardLink }[one.family];
  const names = one.names.filter(Boolean).slice(0, 3).map((name) => (page ? page(name) : name));
  const more = one.count - names.length;
  return [one.count > 1 ? `${count(one.count)} ${one.family}s: ` : `${one.family} `,
    names.flatMap((name, at) => (at ? [", ", name] : [name])), more > 0 && one.names[0] ? ` and ${count(more)} more` : ""];
}

export const journalLink = (name) => h("a", { href: `#/journal/${encodeURIComponent(name)}` }, name);
export const shardLink = (id) => h("a", { href: `#/shard/${encodeURIComponent(id)}` }, id);

export const unknown = "–";

export function count(number) {
  return number === null || number === undefined ? unknown : Math.round(number).toLocaleString("en");
}

export const counted = (number, thing) => `${count(number)} ${thing}${number === 1 ? "" : "s"}`;

export function bytes(number) {
  if (number === null || number === undefined) return unknown;
  let value = number;
  for (const unit of ["B", "KiB", "MiB", "GiB", "TiB"]) {
    if (Math.abs(value) < 1024 || unit === "TiB") return `${unit === "B" ? Math.round(value) : value.toFixed(1)} ${unit}`;
    value /= 1024;
  }
  return unknown;
}

export function rate(number, unit = "") {
  if (number === null || number === undefined) return unknown;
  if (unit === "B") return `${bytes(number)}/s`;
  return `${number >= 10 || number === 0 ? count(number) : number.toFixed(1)}/s`;
}

export function seconds(number) {
  if (number === null || number === undefined) return unknown;
  if (number < 1) return `${Math.round(number * 1000)} ms`;
  if (number < 120) return `${number.toFixed(number < 10 ? 1 : 0)} s`;
  if (number < 7200) return `${Math.round(number / 60)} min`;
  return number < 172800 ? `${Math.round(number / 3600)} h` : `${Math.round(number / 86400)} d`;
}

export function time(milliseconds) {
  if (!milliseconds) return unknown;
  const date = new Date(milliseconds);
  return Number.isNaN(date.getTime()) ? unknown : date.toISOString().replace("T", " ").replace("Z", "Z");
}
