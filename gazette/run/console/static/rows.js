// Rows of a state, and rows that differ between two states.

import { ask } from "./api.js";
import { count, h, put } from "./dom.js";

const AGAIN_MS = 300;

// Asks until the state that an answer needs has been recovered. Shows how far it is. Returns null once it is late.
export async function untilRecovered(route, args, where, is_late) {
  put(where, h("p", { class: "soft" }, "…"));
  for (;;) {
    const data = await ask(route, args);
    if (is_late()) return null;
    if (!data.recovering) return data;
    put(where, h("p", { class: "soft" }, data.recovering));
    await new Promise((wake) => setTimeout(wake, AGAIN_MS));
  }
}

const cell = (value) => (value === null ? h("span", { class: "soft" }, "NULL") : String(value));

function grid(caption, columns, rows) {
  return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
    h("table", null, h("caption", null, caption),
      h("thead", null, h("tr", null, columns.map((name) => h("th", { scope: "col" }, name)))),
      h("tbody", null, rows)));
}

export function resultTable(data, what) {
  const more = data.truncated ? " There are more: see LIMIT of SQL." : "";
  return grid(`${what}: ${count(data.rows.length)}.${more}`, data.columns,
    data.rows.map((row) => h("tr", null, row.map((value) => h("td", { class: typeof value === "number" ? "number" : "name" }, cell(value))))));
}

export function differenceTables(tables) {
  if (!tables.length) return h("p", null, "No row differs.");
  return tables.map((one) => {
    const rows = [
      ...one.changed.map(([before, after, places]) => line("changed", "changed", after, before, places)),
      ...one.added.map((row) => line("added", "added", row)),
      ...one.removed.map((row) => line("removed", "removed", row)),
    ];
    const more = one.truncated ? " There are more rows than are shown." : "";
    return grid(`${one.name}: ${count(one.changed.length)} changed, ${count(one.added.length)} added, ${count(one.removed.length)} removed.${more}`,
      ["What", ...one.columns], rows);
  });
}

function line(style, what, row, before = null, places = []) {
  return h("tr", { class: style }, h("td", null, what), row.map((value, at) => {
    const differs = places.includes(at);
    return h("td", { class: differs ? "differs" : null }, differs ? [h("del", null, cell(before[at])), " → ", h("ins", null, cell(value))] : cell(value ?? null));
  }));
}
