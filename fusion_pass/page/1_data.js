// Reads the page's data; nodes share their strings and, where equal, themselves.

const data = JSON.parse(document.getElementById("data").textContent);

function unpackNode(fields) {
  const [name, op, target, args, type, stride, device, source, module] = fields
    .slice(0, 9)
    .map((index) => (index < 0 ? null : data.strings[index]));
  const inputs = fields[9].map(([input, role]) => ({
    name: data.strings[input],
    role: data.strings[role],
  }));
  return { name, op, target, args, type, stride, device, source, module, inputs };
}

/** One state of a graph: its nodes in order and by name, each with the names of its users. */
function unpackState(graph, indices) {
  const order = indices.map((index) => ({ ...graph.nodes[index], index, users: [] }));
  const byName = new Map(order.map((node) => [node.name, node]));
  for (const node of order) {
    for (const name of new Set(node.inputs.map((input) => input.name))) {
      byName.get(name)?.users.push(node.name);
    }
  }
  return { order, byName };
}

/** Both states of a graph and what each site did to them; made when it is first looked at. */
function open(graph) {
  if (graph.opened) return graph.opened;
  graph.nodes = graph.packed.map(unpackNode);
  const before = unpackState(graph, graph.before);
  const after = unpackState(graph, graph.after);
  const siteOf = new Map();
  for (const site of graph.sites) {
    siteOf.set(site.attention, site);
    const change = graph.changes[site.attention];
    for (const name of change ? [...change.removed, ...change.added] : []) siteOf.set(name, site);
  }
  graph.opened = { before, after, siteOf };
  return graph.opened;
}

function shortTarget(node) {
  if (node.op !== "call_function") return node.op === "placeholder" ? "input" : node.op;
  const parts = node.target.split(".");
  if (parts[0] === "operator" || parts.length < 3) return parts.at(-1);
  return parts[1];
}
