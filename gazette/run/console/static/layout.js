// The places of the nodes of an application's graph: sources, shards, outputs. No drawing here.

const NODES_MAX = 20; // More journals, or more shards, are nodes together.
export const COLUMN = 290, ROW = 52, NODE_WIDTH = 220, NODE_HEIGHT = 34, MARGIN = 10;

// groups: name -> name of its group. Returns name -> label of its node.
function labels(groups, many) {
  if (groups.size <= NODES_MAX) return new Map([...groups.keys()].map((name) => [name, name]));
  if (new Set(groups.values()).size <= NODES_MAX) return groups;
  return new Map([...groups.keys()].map((name) => [name, many]));
}

const directory = (name) => `${name.slice(0, name.lastIndexOf("/") + 1) || name}…`;

// shards: [{id, sources, outputs, dead_letters, bad}]
export function layout(shards) {
  const journals = [...new Set(shards.flatMap((one) => [...one.sources, ...one.outputs]))].sort();
  const journal_label = labels(new Map(journals.map((name) => [name, directory(name)])), "many journals");
  const reads = (one) => `shards of ${[...new Set(one.sources.map((name) => journal_label.get(name)))].join(" ")}`;
  const shard_label = labels(new Map(shards.map((one) => [one.id, reads(one)])), "many shards");
  const nodes = new Map(), edges = new Map();

  function node(kind, label, name, bad = false) {
    const key = `${kind} ${label}`;
    if (!nodes.has(key)) nodes.set(key, { key, kind, label, names: [], bad: false, layer: 0, place: 0 });
    const one = nodes.get(key);
    if (!one.names.includes(name)) one.names.push(name);
    one.bad ||= bad;
    return one;
  }

  function edge(from, to, says) {
    edges.set(`${from.key}>${to.key}`, { from, to, says });
  }

  for (const one of shards) {
    const own = node("shard", shard_label.get(one.id), one.id, one.bad);
    for (const name of one.sources) edge(node("journal", journal_label.get(name), name), own, "is read by");
    for (const name of one.outputs) {
      const dead = one.dead_letters.includes(name);
      edge(own, node(dead ? "dead letters" : "journal", journal_label.get(name), name), dead ? "skips messages to" : "publishes to");
    }
  }
  const list = [...edges.values()];
  set_layers([...nodes.values()], list);
  return place([...nodes.values()], list);
}

// A node stands behind those that lead to it. An edge that closes a circle leads back.
function set_layers(nodes, edges) {
  const forward = edges.filter((edge) => !leads_to(edge.to, edge.from, edges, edge));
  for (let turn = 0; turn < nodes.length; turn += 1) {
    let changed = false;
    for (const { from, to } of forward) {
      if (to.layer <= from.layer) {
        to.layer = from.layer + 1;
        changed = true;
      }
    }
    if (!changed) return;
  }
}

function leads_to(begin, end, edges, edge) {
  if (edge.from.kind !== "shard") return false; // Of a circle, the edges from shards lead back.
  const seen = new Set([begin]), todo = [begin];
  while (todo.length) {
    const at = todo.pop();
    if (at === end) return true;
    for (const { from, to } of edges) {
      if (from === at && !seen.has(to)) {
        seen.add(to);
        todo.push(to);
      }
    }
  }
  return false;
}

function place(nodes, edges) {
  const layers = new Map();
  for (const one of nodes) layers.set(one.layer, [...(layers.get(one.layer) ?? []), one]);
  const tallest = Math.max(1, ...[...layers.values()].map((one) => one.length));
  for (const layer of [...layers.keys()].sort((a, b) => a - b)) {
    const column = layers.get(layer);
    // A node stands near those that lead to it: then fewer edges cross.
    const mean = new Map(column.map((one) => {
      const before = edges.filter((edge) => edge.to === one && edge.from.layer < layer).map((edge) => edge.from.place);
      return [one, before.length ? before.reduce((a, b) => a + b, 0) / before.length : 0];
    }));
    column.sort((a, b) => mean.get(a) - mean.get(b) || (a.key < b.key ? -1 : 1));
    column.forEach((one, at) => {
      one.place = at - (column.length - 1) / 2;
      one.x = layer * COLUMN + MARGIN;
      one.y = (one.place + (tallest - 1) / 2) * ROW + MARGIN;
    });
  }
  return {
    nodes, edges,
    width: Math.max(0, ...layers.keys()) * COLUMN + NODE_WIDTH + 2 * MARGIN,
    height: tallest * ROW + 2 * MARGIN,
  };
}
