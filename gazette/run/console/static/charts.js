// Drawings: a rate over time, fragments over time, and the graph of an application.

import { bytes, h, rate, s, time } from "./dom.js";
import { layout, NODE_HEIGHT, NODE_WIDTH } from "./layout.js";

// A drawing that is scaled down to a phone would have texts that cannot be read.
const drawnWidth = () => Math.max(300, Math.min(900, window.innerWidth - 24));

// points: [[milliseconds, number]]
export function rateChart(points, what) {
  if (points.length < 2) return h("p", { class: "soft" }, "The rate is drawn after some seconds.");
  const width = drawnWidth(), height = 120, left = points[0][0], span = Math.max(1, points[points.length - 1][0] - left);
  const top = Math.max(...points.map((one) => one[1]), 1);
  const place = ([at, value]) => `${(((at - left) / span) * (width - 10) + 5).toFixed(1)},${(height - 20 - (value / top) * (height - 40)).toFixed(1)}`;
  const line = points.map(place).join(" ");
  return h("div", { class: "scroll" }, s("svg", { viewBox: `0 0 ${width} ${height}`, width: "100%", role: "img",
    "aria-label": `${what}: now ${rate(points[points.length - 1][1], "B")}, at most ${rate(top, "B")}` },
    s("polygon", { class: "area", points: `5,${height - 20} ${line} ${width - 5},${height - 20}` }),
    s("polyline", { class: "line", points: line }),
    s("line", { class: "axis", x1: 5, x2: width - 5, y1: height - 20, y2: height - 20 }),
    s("text", { x: 5, y: 14 }, `at most ${rate(top, "B")}`),
    s("text", { x: 5, y: height - 5, class: "soft" }, time(left)),
    s("text", { x: width - 5, y: height - 5, "text-anchor": "end", class: "soft" }, "now")));
}

// Each fragment spans the time since the one before was stored: its height is the rate of appends then.
export function fragmentChart(data, pick) {
  if (!data.bars.length) return h("p", null, "The journal has no fragment yet: nothing was appended.");
  const width = drawnWidth(), height = 170, floor = height - 24, stored = data.bars.filter((bar) => bar.mod_time);
  const first = stored.length ? stored[0].mod_time : data.now - 1;
  const left = first - Math.max(1, (data.now - first) * 0.04), span = Math.max(1, data.now - left);
  const x = (at) => 5 + ((at - left) / span) * (width - 10);
  let previous = left;
  const places = data.bars.map((bar) => {
    const end = bar.mod_time || data.now;
    const begin = Math.min(previous, end);
    previous = end;
    return { bar, begin, end, rate: (bar.end - bar.begin) / Math.max(1, end - begin) };
  });
  const top = Math.max(...places.map((one) => one.rate), 1);
  const boxes = places.map(({ bar, begin, end, rate: speed }) => {
    const tall = Math.max(4, (speed / top) * (floor - 24));
    const kind = bar.conflict ? " conflict" : bar.in_spool ? " spool" : "";
    const says = `${bar.fragments > 1 ? `${bar.fragments} fragments` : "fragment"} [${bar.begin}, ${bar.end}), ${bytes(bar.end - bar.begin)}, ` +
      (bar.in_spool ? "in the spools of brokers" : `stored ${time(bar.mod_time * 1000)} in ${bar.store}`);
    return s("a", { href: location.hash, "aria-label": `Read at ${says}`, onclick: (event) => { event.preventDefault(); pick(bar.begin); } },
      s("rect", { class: `bar${kind}`, x: x(begin).toFixed(1), width: Math.max(2, x(end) - x(begin) - 1).toFixed(1), y: (floor - tall).toFixed(1), height: tall.toFixed(1) },
        s("title", null, says)));
  });
  return [
    h("div", { class: "scroll" }, s("svg", { viewBox: `0 0 ${width} ${height}`, width: "100%", role: "group", "aria-label": "Fragments over time" },
      boxes, s("line", { class: "axis", x1: 5, x2: width - 5, y1: floor, y2: floor }),
      s("text", { x: 5, y: 14 }, `at most ${rate(top, "B")}`),
      s("text", { x: 5, y: height - 6, class: "soft" }, time(left * 1000)),
      s("text", { x: width - 5, y: height - 6, "text-anchor": "end", class: "soft" }, "now"))),
    h("p", { class: "legend" },
      h("span", null, h("span", { class: "swatch" }), "in a store"),
      h("span", null, h("span", { class: "swatch spool" }), "in spools of brokers"),
      h("span", null, h("span", { class: "swatch conflict" }), "in conflict"),
      h("span", null, "The height of a bar is the rate of appends. Choose a bar to read there.")),
  ];
}

export function graph(shards) {
  const { nodes, edges, width, height } = layout(shards), middle = NODE_HEIGHT / 2;
  return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Graph of the application" },
    s("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "group", "aria-label": "Sources, shards and outputs" },
      s("defs", null, s("marker", { id: "arrow", viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 7, markerHeight: 7, orient: "auto" },
        s("path", { d: "M0,0 L8,4 L0,8 z", class: "edge-end" }))),
      edges.map(({ from, to, says }) => {
        const x1 = from.x + NODE_WIDTH, x2 = to.x - 2, y1 = from.y + middle, y2 = to.y + middle;
        const bend = Math.max(30, Math.abs(x2 - x1) / 2);
        return s("path", { class: says.startsWith("skips") ? "edge dead" : "edge", "marker-end": "url(#arrow)",
          d: `M${x1},${y1} C${x1 + bend},${y1} ${x2 - bend},${y2} ${x2},${y2}` }, s("title", null, `${from.label} ${says} ${to.label}`));
      }),
      nodes.map((one) => {
        const is_shard = one.kind === "shard", many = one.names.length > 1;
        const page = many ? (is_shard ? "#/application" : "#/journals") : `#/${is_shard ? "shard" : "journal"}/${encodeURIComponent(one.names[0])}`;
        const label = many ? `${one.label} (${one.names.length})` : one.label;
        const kind = `node ${is_shard ? "shard" : one.kind === "dead letters" ? "dead" : "journal"}${one.bad ? " bad" : ""}`;
        return s("g", { class: kind }, s("a", { href: page, "aria-label": `${one.kind} ${label}${one.bad ? ", not as it should be" : ""}` },
          s("rect", { x: one.x, y: one.y, width: NODE_WIDTH, height: NODE_HEIGHT, rx: is_shard ? 16 : 3 }),
          s("text", { x: one.x + NODE_WIDTH / 2, y: one.y + middle + 4, "text-anchor": "middle" },
            label.length > 31 ? `…${label.slice(-30)}` : label),
          s("title", null, label)));
      })));
}
