import { ask, turns } from "./api.js";
import { bytes, count, counted, h, journalLink, part, put, rate, table, unknown } from "./dom.js";

export function journals() {
  const state = { search: "", sort: "name", page: 0 };
  const begin = turns();
  let pages = 1;
  const search = h("input", { type: "search", id: "search", autocomplete: "off", spellcheck: "false" });
  const form = h("form", {
    role: "search",
    onsubmit: (event) => {
      event.preventDefault();
      ask_for({ search: search.value, page: 0 });
    },
  },
    h("label", { class: "wide", for: "search" }, "Words of names or labels", search),
    h("button", { type: "submit" }, "Search"));
  const rows = part("div", null, (data) => table(
    `${counted(data.total, "journal")}. Rates and heads are asked first for what is shown.`, [
      { head: "Name", cell: (row) => journalLink(row.name), kind: "name", sort: "name" },
      { head: "Head", cell: (row) => count(row.head), kind: "number", sort: "head" },
      { head: "Rate", cell: (row) => rate(row.rate, "B"), kind: "number", sort: "rate" },
      { head: "Replicas", cell: replicas, cellClass: (row) => (row.suspended || row.replicas.length >= row.replication ? "" : "bad"), kind: "number" },
      { head: "Primary", cell: (row) => row.primary || unknown },
      { head: "Content", cell: (row) => row.content_type || unknown },
      { head: "Problem", cell: (row) => row.problem || "", cellClass: () => "bad" },
    ], data.rows, { sort: state.sort, onsort: (sort) => ask_for({ sort, page: 0 }) }));
  const where = h("span", { role: "status" });
  const before = h("button", { type: "button", onclick: () => ask_for({ page: state.page - 1 }) }, "Previous page");
  const after = h("button", { type: "button", onclick: () => ask_for({ page: state.page + 1 }) }, "Next page");

  function replicas(row) {
    if (row.suspended) return `suspended (${row.suspended})`;
    return `${row.replicas.length} of ${row.replication}`;
  }

  function ask_for(change) {
    Object.assign(state, change);
    refresh().catch((error) => put(where, error.message));
  }

  async function refresh() {
    const is_late = begin();
    const data = await ask("journals", state);
    if (is_late()) return;
    state.page = data.page;
    pages = data.pages;
    rows.update({ ...data, sort: state.sort });
    put(where, `Page ${data.page + 1} of ${pages}`);
    before.disabled = data.page === 0;
    after.disabled = data.page + 1 >= pages;
  }

  return {
    title: "Journals",
    refresh,
    element: h("div", null, h("h1", null, "Journals"), form, rows, h("div", { class: "controls" }, before, where, after)),
  };
}
