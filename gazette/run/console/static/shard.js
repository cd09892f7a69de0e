import { ask, turns } from "./api.js";
import { bytes, cards, count, h, journalLink, notice, part, put, rate, seconds, table, time, unknown, verdicts } from "./dom.js";
import { behind, phase, standbys, state_text } from "./application.js";
import { withRates } from "./rates.js";
import { changeButtons } from "./changes.js";
import { differenceTables, resultTable, untilRecovered } from "./rows.js";

const TIMERS = "SELECT CASE domain WHEN 0 THEN 'processing' ELSE 'event' END AS clock, key, " +
  "strftime('%Y-%m-%d %H:%M:%fZ', at / 1e6, 'unixepoch') AS at, length(payload) AS payload_bytes FROM gazette_timer ORDER BY domain, gazette_timer.at LIMIT 100";

export function shard(id, at = null) {
  const wrong = part("div", null, (list) => (list.length ? verdicts(list) : null));
  const sums = part("div", null, (row) => cards([
    ["State", state_text(row), row.status === "PRIMARY" ? "good" : "bad"], ["Messages", rate(row.rates.read_messages)],
    ["Transactions", rate(row.rates.transactions)], ["Behind", behind(row)], ["Most of its time", phase(row.shares)],
    ["A recovery reads", bytes(row.horizon_bytes)], ["Waits to be appended", bytes(row.backlog_bytes)], ["Restarts", count(row.restarts)],
  ]));
  const facts = part("div", null, (row) => [
    table("Sources", [
      { head: "Journal", cell: (one) => journalLink(one), kind: "name" },
      { head: "Read up to", cell: (one) => count(row.read_through[one]), kind: "number" },
      { head: "Head", cell: (one) => count(row.heads[one]), kind: "number" },
    ], row.sources),
    Object.keys(row.publish_at).length > 0 && table("Outputs", [
      { head: "Journal", cell: (one) => journalLink(one), kind: "name" },
      { head: "Published at", cell: (one) => count(row.publish_at[one]), kind: "number" },
    ], Object.keys(row.publish_at)),
    table("Replicas", [
      { head: "Member", cell: (one) => one.member, kind: "name" }, { head: "Role", cell: (one) => (one.primary ? "primary" : "standby") },
      { head: "State", cell: (one) => one.status },
      { head: "Behind", cell: (one) => (one.lag_bytes === null || one.lag_bytes === undefined ? unknown : `${bytes(one.lag_bytes)}, ${seconds(one.lag_s)}`) },
      { head: "Errors", cell: (one) => one.errors.join("; "), kind: "name" },
    ], row.replicas),
    h("p", null, "Recovery log: ", row.recovery_log ? journalLink(row.recovery_log) : "none"),
  ]);
  const hints = h("div");
  const state = stateView(id, at);
  let begun = false;

  async function refresh() {
    const row = withRates(await ask("shard", { id }));
    wrong.update(row.verdicts);
    sums.update(row);
    facts.update(row);
    if (begun) return;
    begun = true;
    state.begin();
    show_hints();
  }

  async function show_hints() {
    try {
      const data = await ask("hints", { id });
      put(hints, data.slots.length ? table("Hints: what a recovery reads", [
        { head: "Slot", cell: (one) => one.slot }, { head: "Log", cell: (one) => journalLink(one.log), kind: "name" },
        { head: "Files", cell: (one) => count(one.files), kind: "number" }, { head: "Reads", cell: (one) => bytes(one.read_bytes), kind: "number" },
      ], data.slots) : h("p", null, "There are no hints yet."), data.errors.map((text) => notice(text, "")));
    } catch (error) {
      put(hints, notice(error.message, error.hint));
    }
  }

  return {
    title: id, refresh, leave: state.leave,
    element: h("div", null, h("h1", null, `Shard ${id}`), wrong, sums,
      changeButtons([{ says: "Restart if it has failed", route: "unassign", args: { name: id } }]),
      state.element,
      h("section", { "aria-labelledby": "facts" }, h("h2", { id: "facts" }, "What it reads and where it is"), facts, hints)),
  };
}

// The state of a shard: SQL, a slider of moments, and the rows that differ between two of them.
function stateView(id, begin_at) {
  let moments = null, at = begin_at, gone = false;
  const slider = h("input", { type: "range", id: "moment", min: "0", step: "1", oninput: say, onchange: pick });
  const place = h("input", { type: "text", id: "at", autocomplete: "off", placeholder: "2026-01-31T12:00:00Z, an offset, or journal=offset" });
  const says = h("output", { for: "moment" });
  const sql = h("textarea", { id: "sql", spellcheck: "false" });
  const status = h("div", { role: "status" }), result = h("div"), tables = h("div"), changes = h("div"), timers = h("div"), commits = h("div");
  const other = h("select", { id: "other" });
  const form = h("form", { onsubmit: (event) => { event.preventDefault(); query(); } },
    h("label", { class: "wide", for: "sql" }, "SQL that reads (at most 1,000 rows, 10 s)", sql), h("button", { type: "submit" }, "Run"));
  const goto = h("form", { onsubmit: (event) => { event.preventDefault(); if (place.value.trim()) open(place.value.trim()); } },
    h("label", { class: "wide", for: "at" }, "Or at this time, offset of the log, or checkpoint", place), h("button", { type: "submit" }, "Go there"),
    h("button", { type: "button", onclick: () => begin(true) }, "Newest"));
  const compare = h("form", { onsubmit: (event) => { event.preventDefault(); difference(other.value, at); } },
    h("label", { for: "other" }, "Compare with the state of", other), h("button", { type: "submit" }, "Show the rows that differ"));
  const element = h("section", { "aria-labelledby": "state" }, h("h2", { id: "state" }, "State"),
    h("label", { class: "block", for: "moment" }, "As of", slider), says, goto, status, tables, form, result,
    h("h3", null, "Rows that differ"), compare, changes, timers, h("section", { "aria-labelledby": "commits" }, h("h3", { id: "commits" }, "Last transactions, as the recovery log has them"), commits));

  const chosen = () => {
    const left = moments.first_ms ?? moments.last_ms;
    return Math.round(left + (slider.value / 1000) * (moments.last_ms - left));
  };

  function say() {
    if (moments) put(says, slider.value === slider.max ? "the newest commit" : time(chosen()));
  }

  function pick() {
    if (!moments) return;
    open(slider.value === slider.max ? String(moments.head) : new Date(chosen()).toISOString());
  }

  async function begin(newest = false) {
    try {
      moments = await ask("moments", { id });
    } catch (error) {
      put(status, notice(error.message, error.hint));
      return;
    }
    moments.last_ms = moments.commits.length ? moments.commits[moments.commits.length - 1].time_ms : Date.now();
    slider.max = "1000";
    slider.value = "1000";
    say();
    put(commits, moments.commits.length ? table(`The log ends at ${count(moments.head)}`, [
      { head: "Time", cell: (one) => time(one.time_ms) }, { head: "Offset", cell: (one) => count(one.begin), kind: "number" },
      { head: "Bytes", cell: (one) => bytes(one.end - one.begin), kind: "number" }, { head: "Operations", cell: (one) => count(one.operations), kind: "number" },
      { head: "Look", cell: (one) => [
        h("button", { type: "button", "data-key": `at ${one.end}`, onclick: () => open(String(one.end)) }, "State after it"), " ",
        h("button", { type: "button", "data-key": `rows ${one.end}`, onclick: () => { open(String(one.end)); difference(String(one.begin), String(one.end)); } }, "Rows it changed")] },
    ], [...moments.commits].reverse().slice(0, 20)) : h("p", null, "The log has no commit with a time."));
    put(other, [...moments.commits].reverse().map((one) => h("option", { value: String(one.begin) }, `before ${time(one.time_ms)} (offset ${one.begin})`)));
    await open(newest || at === null ? String(moments.head) : at);
  }

  async function open(moment) {
    at = moment;
    place.value = moment;
    let has_timers = false;
    const is_shown = await show(open_turn, "state", { id, at }, status, (data) => {
      put(status, h("p", { class: "soft" }, `The state at offset ${count(data.offset)} of its log`, data.time_ms ? `, recorded ${time(data.time_ms)}` : "", `. Kind: ${data.kind}.`));
      const own = data.tables.filter(([name]) => !name.startsWith("sqlite_"));
      put(tables, h("p", null, "Tables: ", own.map(([name]) => [h("button", { type: "button", "data-key": `table ${name}`, onclick: () => {
        sql.value = `SELECT * FROM "${name.replaceAll('"', '""')}" LIMIT 100`;
        query();
      } }, name), " "])), h("details", null, h("summary", null, "Their definitions"), own.map(([, , text]) => h("pre", null, text))));
      if (!sql.value) {
        const first = own.map(([name]) => name).find((name) => !name.startsWith("gazette_") && name !== "document") ?? own[0]?.[0];
        if (first) sql.value = `SELECT * FROM "${first.replaceAll('"', '""')}" LIMIT 100`;
      }
      has_timers = own.some(([name]) => name === "gazette_timer");
    });
    if (!is_shown) return;
    await query();
    await show_timers(has_timers);
  }

  // Asks for something of a state, and draws it, unless something else was asked for the same place meanwhile.
  async function show(begin_turn, route, args, where, draw) {
    const is_newer = begin_turn(), is_late = () => gone || is_newer();
    try {
      const data = await untilRecovered(route, args, where, is_late);
      if (data) draw(data);
      return data !== null;
    } catch (error) {
      if (!is_late()) put(where, notice(error.message, error.hint));
      return false;
    }
  }

  const open_turn = turns(), query_turn = turns(), timers_turn = turns(), difference_turn = turns();

  async function query() {
    if (!sql.value.trim() || at === null) return;
    await show(query_turn, "query", { id, at, sql: sql.value }, result, (data) => put(result, resultTable(data, "Rows")));
  }

  async function show_timers(has) {
    if (!has) return put(timers);
    await show(timers_turn, "query", { id, at, sql: TIMERS }, timers, (data) =>
      put(timers, h("h3", null, "Timers to come"), data.rows.length ? resultTable(data, "Timers") : h("p", null, "There is none.")));
  }

  async function difference(before, after) {
    if (!before || after === null) return;
    await show(difference_turn, "difference", { id, before, after }, changes, (data) => {
      put(changes, differenceTables(data.tables));
      changes.scrollIntoView({ block: "nearest" });
    });
  }

  return { element, begin, leave: () => { gone = true; } };
}
