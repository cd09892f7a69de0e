import { ask } from "./api.js";
import { rates } from "./rates.js";
import { bytes, cards, count, h, part, seconds, table, unknown, verdicts } from "./dom.js";

export function cluster() {
  const status = document.getElementById("status");
  const wrong = part("div", null, (data) => verdicts(data.verdicts, data.verdicts_total));
  const sums = part("div", null, (data) => cards(data));
  const members = part("div", null, (rows) => table("Brokers and members, as the lists name them", [
    { head: "Kind", cell: (row) => row.kind },
    { head: "Zone", cell: (row) => row.zone },
    { head: "Id", cell: (row) => row.id, kind: "name" },
    { head: "State", cell: (row) => row.state, cellClass: (row) => (row.serves ? "good" : "bad") },
    { head: "Primary of", cell: (row) => count(row.primary), kind: "number" },
    { head: "Replicas", cell: (row) => count(row.replicas), kind: "number" },
    { head: "Processor", cell: (row) => (row.cpu === undefined ? unknown : `${(row.cpu * 100).toFixed(1)} %`), kind: "number" },
    { head: "Memory", cell: (row) => bytes(row.memory), kind: "number" },
    { head: "Version", cell: (row) => row.version || unknown },
    { head: "Endpoint", cell: (row) => row.endpoint || unknown, kind: "name" },
  ], rows));
  let said = null;

  async function refresh() {
    const data = await ask("cluster");
    wrong.update({ verdicts: data.verdicts, verdicts_total: data.verdicts_total });
    sums.update([
      ["Brokers", data.members.filter((one) => one.kind === "broker").length],
      ["Members", data.members.filter((one) => one.kind === "consumer").length],
      ["Journals", h("a", { href: "#/journals" }, count(data.journals))],
      ["Shards", h("a", { href: "#/application" }, count(data.shards))],
      ["Listed", data.age_s === null ? unknown : `${seconds(data.age_s)} ago`],
    ].map(([name, value]) => [name, value]));
    members.update(data.members.map((one) => ({ ...one,
      cpu: rates(one.endpoint, one.sampled_at, { cpu: one.cpu_s ?? 0 })?.cpu })));
    const text = data.verdicts_total ? `not as it should be: ${data.verdicts_total}` : "everything is as it should be";
    if (text !== said) status.textContent = said = text;
  }

  return {
    title: "Cluster",
    refresh,
    element: h("div", null,
      h("h1", null, "Cluster"),
      h("section", { "aria-labelledby": "wrong" }, h("h2", { id: "wrong" }, "What is not as it should be"), wrong),
      sums,
      h("section", { "aria-labelledby": "members" }, h("h2", { id: "members" }, "Members"), members)),
  };
}
