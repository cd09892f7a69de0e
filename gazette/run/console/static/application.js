import { ask, turns } from "./api.js";
import { bytes, cards, count, counted, h, journalLink, notice, part, put, rate, seconds, shardLink, table, time, unknown, verdicts } from "./dom.js";
import { graph } from "./charts.js";
import { withRates } from "./rates.js";

const PHASES = {
  "10-not-running": "waits for messages", "20-consuming": "consumes", "30-stalled": "waits for a commit",
  "40-preparing": "prepares", "50-committing": "commits", "60-acknowledging": "acknowledges",
};

export function application() {
  const state = { search: "", page: 0 };
  const begin = turns();
  const heading = h("h1", null, "Application");
  const wrong = part("div", null, (list) => verdicts(list));
  const sums = part("div", null, (pairs) => cards(pairs));
  const drawing = part("div", null, (edges) => (edges.length ? graph(edges) : h("p", null, "There is no shard: no application runs here, or no --consumer.address was given.")));
  const search = h("input", { type: "search", id: "search", autocomplete: "off", spellcheck: "false" });
  const form = h("form", { role: "search", onsubmit: (event) => { event.preventDefault(); Object.assign(state, { search: search.value, page: 0 }); again(); } },
    h("label", { class: "wide", for: "search" }, "Words of ids or states", search), h("button", { type: "submit" }, "Search"));
  const where = h("span", { role: "status" });
  const before = h("button", { type: "button", onclick: () => { state.page -= 1; again(); } }, "Previous page");
  const after = h("button", { type: "button", onclick: () => { state.page += 1; again(); } }, "Next page");
  const shards = part("div", null, (data) => table(counted(data.total, "shard"), [
    { head: "Shard", cell: (row) => shardLink(row.id), kind: "name" },
    { head: "State", cell: state_text, cellClass: (row) => (row.status === "PRIMARY" && !row.waits_for ? "good" : "bad") },
    { head: "Messages", cell: (row) => rate(row.rates.read_messages), kind: "number" },
    { head: "Transactions", cell: (row) => rate(row.rates.transactions), kind: "number" },
    { head: "Behind", cell: behind, kind: "number" },
    { head: "Behind by", cell: (row) => (row.lag_bytes === 0 ? seconds(0) : seconds(row.lag_s)), kind: "number" },
    { head: "Most of its time", cell: (row) => phase(row.shares) },
    { head: "Standbys", cell: standbys },
    { head: "Restarts", cell: (row) => count(row.restarts), kind: "number" },
    { head: "Skipped", cell: (row) => count(row.poison_messages), kind: "number" },
  ], data.rows));
  const letters = h("section", { "aria-labelledby": "letters" });
  let letters_of = null;

  async function again() {
    await refresh().catch((error) => put(where, error.message));
  }

  async function refresh() {
    const is_late = begin();
    const data = await ask("application", state);
    if (is_late()) return;
    state.page = data.page;
    put(heading, data.name ? `Application ${data.name}` : "Application");
    wrong.update(data.verdicts);
    const rows = data.rows.map(withRates);
    const sum = (name) => rows.reduce((total, row) => total + (row[name] ?? 0), 0);
    const behind = rows.some((row) => row.lag_bytes === null) ? null : sum("lag_bytes");
    const of = data.pages > 1 ? " (this page)" : "";
    const sum_rates = (name) => (rows.some((row) => name in row.rates) ? rows.reduce((total, row) => total + (row.rates[name] ?? 0), 0) : null);
    sums.update([["Shards", count(data.total)], [`Messages${of}`, rate(sum_rates("read_messages"))], [`Bytes${of}`, rate(sum_rates("read_bytes"), "B")],
      [`Behind${of}`, bytes(behind)], [`Restarts${of}`, count(sum("restarts"))], [`Skipped messages${of}`, count(sum("poison_messages"))]]);
    drawing.update(data.edges);
    shards.update({ rows, total: data.total });
    put(where, `Page ${data.page + 1} of ${data.pages}`);
    before.disabled = data.page === 0;
    after.disabled = data.page + 1 >= data.pages;
    const names = [...new Set(data.edges.flatMap((one) => one.dead_letters))].sort();
    const key = `${names} ${sum("poison_messages")}`;
    if (key !== letters_of) {
      letters_of = key;
      await show_letters(names);
    }
  }

  async function show_letters(names) {
    if (!names.length) return put(letters);
    const parts = await Promise.all(names.map((name) => deadLetters(name)));
    put(letters, h("h2", { id: "letters" }, "Dead letters"), parts);
  }

  return {
    title: "Application",
    refresh,
    element: h("div", null, heading, wrong, sums,
      h("section", { "aria-labelledby": "graph" }, h("h2", { id: "graph" }, "What it reads and writes"), drawing),
      h("section", { "aria-labelledby": "shards" }, h("h2", { id: "shards" }, "Shards"), form, shards, h("div", { class: "controls" }, before, where, after)),
      letters),
  };
}

export function state_text(row) {
  return [row.status, row.waits_for && ` waits for ${row.waits_for}`, row.play_back && row.status !== "PRIMARY" && `: ${row.play_back}`].filter(Boolean).join("");
}

// Messages are an estimate, by the mean size of those that were read.
export function behind(row) {
  return row.lag_messages ? `${bytes(row.lag_bytes)}, about ${counted(row.lag_messages, "message")}` : bytes(row.lag_bytes);
}

export function phase(phases) {
  const [name, share] = Object.entries(phases).sort((a, b) => b[1] - a[1])[0] ?? [];
  return !share ? unknown : `${PHASES[name] ?? name} (${Math.round(share * 100)} %)`;
}

export function standbys(row) {
  const others = row.replicas.filter((one) => !one.primary);
  if (!others.length) return unknown;
  return others.map((one) => h("div", null, `${one.member}: `,
    one.lag_bytes === null || one.lag_bytes === undefined ? one.status : `${bytes(one.lag_bytes)}, ${seconds(one.lag_s)} behind`));
}

async function deadLetters(name) {
  let data;
  try {
    data = await ask("messages", { name, count: 20 });
  } catch (error) {
    return notice(error.message, error.hint);
  }
  const letters = data.messages.filter((one) => one.role !== "acknowledgement").reverse().map((one) => {
    try {
      return { ...one, letter: JSON.parse(one.text) };
    } catch {
      return { ...one, letter: null };
    }
  });
  if (!letters.length) return h("p", null, journalLink(name), ": there is none.");
  return [h("p", null, "The last ones of ", journalLink(name), ":"), table(`Dead letters of ${name}`, [
    { head: "Time", cell: (row) => time(row.time_ms) },
    { head: "Shard", cell: (row) => (row.letter?.shard ? shardLink(row.letter.shard) : unknown) },
    { head: "Reason", cell: (row) => row.letter?.reason ?? "not a dead letter" },
    { head: "Error", cell: (row) => row.letter?.error ?? row.text, kind: "name" },
    { head: "Message", cell: (row) => original(row.letter), kind: "name" },
  ], letters)];
}

function original(letter) {
  if (!letter?.journal) return letter?.timer ? `timer ${letter.timer}` : unknown;
  const place = h("div", { role: "status" });
  return [journalLink(letter.journal), ` at ${letter.begin} `, h("button", {
    type: "button", "data-key": `show ${letter.journal} ${letter.begin}`,
    onclick: async () => {
      try {
        const data = await ask("messages", { name: letter.journal, offset: letter.begin, count: 1 });
        const message = data.messages[0];
        put(place, message && message.begin === letter.begin ? h("pre", null, message.text) : notice("The message is not there any more.", "It was pruned, or lost."));
      } catch (error) {
        put(place, notice(error.message, error.hint));
      }
    },
  }, "Show the message"), place];
}
