// Messages of a journal: the last ones, at an offset or a time, and those that follow.

import { ask, turns } from "./api.js";
import { fieldsText } from "./protobuf.js";
import { bytes, count, h, notice, put, time, unknown } from "./dom.js";

const SHOWN_MAX = 200;

export function messageTable(name) {
  let shown = [], next = null, head = 0, following = true, busy = false;
  const begin = turns();
  const place = h("input", { type: "text", id: "place", autocomplete: "off", placeholder: "offset, or 2026-01-31T12:00:00Z" });
  const body = h("div");
  const says = h("p", { class: "soft", role: "status" });
  const live = h("input", { type: "checkbox", checked: true, onchange: () => { following = live.checked; } });
  const form = h("form", {
    onsubmit: (event) => {
      event.preventDefault();
      const text = place.value.trim();
      if (/^\d+$/.test(text)) read({ offset: text });
      else if (text && Number.isNaN(Date.parse(text))) put(says, "Give an offset such as 12345, or a time such as 2026-01-31T12:00:00Z.");
      else read(text ? { time_ms: Date.parse(text) } : {});
    },
  },
    h("label", { class: "wide", for: "place" }, "Read at (empty: the last messages)", place),
    h("button", { type: "submit" }, "Read"),
    h("label", { class: "row" }, live, "follow what is appended"));

  function draw(notes, data) {
    put(says, `Bytes ${count(data.first)} to ${count(data.head)}. ${notes.join(". ")}`);
    put(body, shown.length ? rows(following ? marked(shown).reverse() : marked(shown), name) : h("p", null, "There is no message here."),
      next !== null && next < data.head && !following && h("button", { type: "button", onclick: more }, "More messages"));
  }

  async function read(where) {
    following = live.checked = !("offset" in where || "time_ms" in where);
    await show(() => ask("messages", { name, ...where }), []);
    if (!following) body.scrollIntoView({ block: "nearest" });
  }

  async function more() {
    await show(() => ask("messages", { name, next, count: 100 }), shown);
  }

  // Shows what was appended. If that is more than a page, only the last messages of it.
  async function follow() {
    if (!following || busy) return;
    if (next === null) return read({});
    const data = await show(() => ask("messages", { name, next, seen: head, count: 100 }), shown);
    if (following && data?.behind) await read({});
  }

  async function show(asking, before) {
    const is_late = begin();
    busy = true;
    try {
      const data = await asking();
      if (is_late()) return null;
      shown = [...before, ...data.messages].slice(-SHOWN_MAX);
      next = data.next;
      head = data.head;
      draw(data.notes, data);
      return data;
    } catch (error) {
      if (is_late()) return null;
      put(body, notice(error.message, error.hint));
      if (next === null) following = live.checked = false;
    } finally {
      if (!is_late()) busy = false;
    }
    return null;
  }

  return {
    element: h("section", { "aria-labelledby": "messages" }, h("h2", { id: "messages" }, "Messages"), form, says, body),
    read,
    follow,
  };
}

// Notes in each pending message by which of the read acknowledgements it has ended, and how.
export function marked(messages) {
  const pending = new Map();
  const result = messages.map((one) => ({ ...one }));
  for (const one of result) {
    if (one.role === "pending") pending.set(one.producer, [...(pending.get(one.producer) ?? []), one]);
    else if (one.producer) {
      for (const earlier of pending.get(one.producer) ?? []) {
        const late = one.role === "acknowledgement" && BigInt(earlier.clock) > BigInt(one.clock);
        Object.assign(earlier, { role: late ? "rolled back" : "committed", ended_at: one.begin });
      }
      pending.delete(one.producer);
    }
  }
  return result;
}

export function rows(messages, journal) {
  return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": `Messages of ${journal}${messages.length === 1 ? `, at ${messages[0].begin}` : ""}` },
    h("table", { class: "stack" },
      h("thead", null, h("tr", null, ["Offset", "Time", "Role", "Message"].map((text) => h("th", { scope: "col" }, text)))),
      h("tbody", null, messages.map((one) => h("tr", null,
        h("td", { class: "number", "data-head": "Offset" },
          one.producer ? h("a", { href: `#/trace/${encodeURIComponent(journal)}/${one.begin}`, title: "From which transaction is it?" }, one.begin) : one.begin),
        h("td", { "data-head": "Time", class: "mono" }, one.time_ms ? time(one.time_ms) : unknown),
        h("td", { "data-head": "Role" }, one.role ? `${one.role}${one.ended_at === undefined ? "" : ` at ${one.ended_at}`}` : "no UUID"),
        h("td", { "data-head": "Message", class: "name" }, h("pre", null, one.fields ? fieldsText(one.fields) : one.text),
          one.more_bytes > 0 && h("p", { class: "soft" }, `${bytes(one.more_bytes)} more (${count(one.more_bytes)} bytes)`)))))));
}
