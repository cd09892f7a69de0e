// From an output back: the transaction of a message, what it read, and the rows that it changed.

import { bytes, cards, count, h, journalLink, notice, put, shardLink, time } from "./dom.js";
import { marked, rows } from "./messages.js";
import { differenceTables, untilRecovered } from "./rows.js";

export function trace(journal, offset) {
  const place = h("div", { role: "status" });
  let begun = false, gone = false;

  async function refresh() {
    if (begun) return;
    begun = true;
    try {
      const data = await untilRecovered("trace", { name: journal, offset }, place, () => gone);
      if (data) put(place, draw(data, journal));
    } catch (error) {
      if (!gone) put(place, notice(error.message, error.hint ?? ""));
    }
  }

  return {
    title: `${journal} at ${offset}`, refresh, leave: () => { gone = true; },
    element: h("div", null, h("h1", null, "From an output back"), h("p", null, journalLink(journal), ` at offset ${offset}`), place),
  };
}

function draw(data, journal) {
  const at = `#/shard/${encodeURIComponent(data.shard)}/${data.commit.end}`;
  return [
    cards([
      ["Published by", shardLink(data.shard)], ["Committed", time(data.commit.time_ms)],
      ["In its log", h("a", { href: at }, `${count(data.commit.begin)} to ${count(data.commit.end)}`)],
      ["Size", bytes(data.commit.end - data.commit.begin)], ["Acknowledged at", count(data.acknowledgement.begin)],
    ]),
    h("h2", null, "The message"), rows([{ ...data.message, role: "committed", ended_at: data.acknowledgement.begin }], journal),
    h("h2", null, "Rows that its transaction changed"), data.notes.map((text) => notice(text, "", "note")), data.notes.length > 0 && !data.tables.length ? null : differenceTables(data.tables),
    h("h2", null, "Messages that its transaction read"),
    data.inputs.length ? data.inputs.map((one) => [
      h("h3", null, journalLink(one.journal), ` ${count(one.begin)} to ${count(one.end)}`),
      one.messages.length ? rows(marked(one.messages), one.journal) : h("p", null, "They are not in the journal any more."),
      one.next < one.end && h("p", { class: "soft" }, `and more, up to offset ${count(one.end)}`),
      one.notes.map((text) => notice(text, "", "note"))]) : h("p", null, "None: timers may have published it."),
  ];
}
