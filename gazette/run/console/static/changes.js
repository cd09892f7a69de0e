// Changes, where the console was started with --allow-changes. Each shows its command first.

import { change } from "./api.js";
import { h, notice, put } from "./dom.js";
import { session } from "./session.js";

// buttons: [{says, route, args}]
export function changeButtons(buttons) {
  if (!session.changes) return null;
  const outcome = h("div", { role: "status" });
  let armed = null;

  async function run(button, dry_run) {
    put(outcome, h("p", { class: "soft" }, "It is being asked …"));
    try {
      const data = await change(button.route, { ...button.args, dry_run: dry_run ? "yes" : "no" });
      armed = dry_run && data.code === 0 ? button : null;
      put(outcome, h("p", null, h("code", null, data.command)), h("pre", null, data.output),
        armed && h("button", { type: "button", onclick: () => run(button, false) }, `${button.says}: do it`));
    } catch (error) {
      put(outcome, notice(error.message, error.hint));
    }
  }

  return h("section", { "aria-label": "Changes" },
    h("div", { class: "controls" }, buttons.map((button) =>
      h("button", { type: "button", onclick: () => run(button, true) }, `${button.says} …`))), outcome);
}
