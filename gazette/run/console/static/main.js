// Chooses the view of the address, and asks for it again while the page is seen.

import { ask } from "./api.js";
import { h, notice, put } from "./dom.js";
import { cluster } from "./cluster.js";
import { journals } from "./journals.js";
import { journal } from "./journal.js";
import { application } from "./application.js";
import { shard } from "./shard.js";
import { trace } from "./trace.js";
import { session } from "./session.js";

const EVERY_MS = 3000;
const main = document.getElementById("main");
const trouble = document.getElementById("trouble");

// A view is {title, element, refresh()}: refresh asks, and draws what it got.
const VIEWS = [
  [/^\/?$/, () => cluster()],
  [/^\/journals$/, () => journals()],
  [/^\/journal\/([^/]+)$/, (name) => journal(name)],
  [/^\/application$/, () => application()],
  [/^\/shard\/([^/]+)$/, (id) => shard(id)],
  [/^\/shard\/([^/]+)\/([^/]+)$/, (id, at) => shard(id, at)],
  [/^\/trace\/([^/]+)\/(\d+)$/, (name, offset) => trace(name, offset)],
];

let present = { refresh: async () => {} };
let turn = 0;

function route() {
  const [path] = location.hash.slice(1).split("?");
  for (const [pattern, make] of VIEWS) {
    const match = pattern.exec(path);
    if (!match) continue;
    let words;
    try {
      words = match.slice(1).map(decodeURIComponent);
    } catch {
      break;
    }
    return make(...words);
  }
  return { title: "No such page", element: h("div", null, h("h1", null, "No such page"), notice("There is no such page.", "Choose one above.")), refresh: async () => {} };
}

function show() {
  turn += 1;
  present.leave?.();
  present = route();
  document.title = `${present.title} – Gazette`;
  put(main, present.element);
  put(trouble);
  for (const link of document.querySelectorAll("nav a")) {
    if (link.hash === (location.hash || "#/")) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  loop(turn);
}

async function loop(mine) {
  while (mine === turn) {
    const view = present;
    if (!document.hidden) {
      try {
        await view.refresh();
        if (mine === turn) put(trouble);
      } catch (error) {
        if (mine === turn) put(trouble, notice(error.message, error.hint ?? "Please report this: it is a defect of the page."));
        if (error.closed) return;
      }
    }
    await new Promise((wake) => setTimeout(wake, view.every ?? EVERY_MS));
  }
}

async function begin() {
  try {
    Object.assign(session, await ask("session"));
    put(document.getElementById("where"), [session.context && `context ${session.context}`,
      session.addresses.broker, session.addresses.consumer].filter(Boolean).join(" · "));
    put(document.getElementById("about"), `Gazette ${session.version}. `,
      session.changes ? "Changes are allowed." : "This console only reads.");
  } catch (error) {
    put(main, notice(error.message, error.hint));
    return;
  }
  window.addEventListener("hashchange", () => {
    show();
    main.focus();
  });
  show();
}

begin();
