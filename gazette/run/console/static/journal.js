import { ask } from "./api.js";
import { bytes, cards, count, counted, h, notice, part, put, rate, seconds, shardLink, table, unknown, verdicts } from "./dom.js";
import { fragmentChart, rateChart } from "./charts.js";
import { messageTable } from "./messages.js";
import { changeButtons } from "./changes.js";

const FRAGMENTS_EVERY_MS = 30000;
const POINTS_MAX = 400;

export function journal(name) {
  const points = [];
  let fragments_at = 0;
  const wrong = part("div", null, (list) => list.length ? verdicts(list) : null);
  const sums = part("div", null, (data) => cards([
    ["Head", count(data.head)], ["Rate", rate(data.rate, "B")],
    ["Replicas", data.suspended ? `suspended (${data.suspended})` : `${data.replicas.length} of ${data.replication}`],
    ["Content", data.content_type || "not said"], ["Fragments", `${bytes(data.fragment_bytes)}, ${data.codec}`],
    ["Kept", data.retention_s ? seconds(data.retention_s) : "for ever"],
  ]));
  const chart = h("div");
  const facts = part("div", null, (data) => [
    table("Replicas", [
      { head: "Member", cell: (row) => row.member, kind: "name" },
      { head: "Role", cell: (row) => (row.member === data.primary ? "primary" : "replica") },
      { head: "Endpoint", cell: (row) => row.endpoint || unknown, kind: "name" },
    ], data.replicas.map((member, at) => ({ member, endpoint: data.endpoints[at] }))),
    h("p", null, "Stores: ", data.stores.join(", ") || "none"),
    data.shards.length > 0 && h("p", null, "Shards: ", data.shards.flatMap((one, at) =>
      [at ? ", " : "", shardLink(one.id), one.reads ? " reads it" : " has it as recovery log"])),
    h("details", null, h("summary", null, `Labels (${Object.keys(data.labels).length})`),
      table("Labels", [{ head: "Name", cell: (row) => row[0], kind: "name" }, { head: "Value", cell: (row) => row[1], kind: "name" }],
        Object.entries(data.labels))),
  ]);
  const timeline = h("div", null, h("p", { class: "soft" }, "Fragments are being listed …"));
  const reader = messageTable(name);

  async function show_fragments() {
    try {
      const data = await ask("fragments", { name });
      put(timeline,
        h("p", null, `${counted(data.count, "fragment")}, ${bytes(data.bytes)} in all. Not stored yet: ${count(data.count - data.stored)}.`),
        fragmentChart(data, (offset) => reader.read({ offset })),
        data.conflicts.map((text) => notice(`In conflict: ${text}`, "Both have the same offsets, and other bytes. The first is read.")),
        data.holes.map((hole) => notice(`No fragment has offsets ${hole.begin} to ${hole.end}.`, "Readers go on behind them. See `gazctl fragments`.")));
    } catch (error) {
      put(timeline, notice(error.message, error.hint));
    }
  }

  async function refresh() {
    const data = await ask("journal", { name });
    wrong.update(data.verdicts);
    sums.update(data);
    facts.update({ primary: data.primary, replicas: data.replicas, endpoints: data.endpoints, stores: data.stores, shards: data.shards, labels: data.labels });
    const now = Date.now();
    if (data.rate !== null) points.push([now, data.rate]);
    if (points.length > POINTS_MAX) points.shift();
    put(chart, rateChart(points, `Appends to ${name}`));
    if (now >= fragments_at) {
      fragments_at = now + FRAGMENTS_EVERY_MS;
      show_fragments();
    }
    await reader.follow();
  }

  return {
    title: name,
    refresh,
    element: h("div", null,
      h("h1", null, name), wrong, sums,
      changeButtons([
        { says: "Suspend", route: "suspend", args: { name } },
        { says: "Reset the head", route: "reset-head", args: { name } },
      ]),
      h("section", { "aria-labelledby": "rate" }, h("h2", { id: "rate" }, "Appends while this page is open"), chart),
      h("section", { "aria-labelledby": "fragments" }, h("h2", { id: "fragments" }, "Fragments over time"), timeline),
      reader.element,
      h("section", { "aria-labelledby": "facts" }, h("h2", { id: "facts" }, "Where it is"), facts)),
  };
}
