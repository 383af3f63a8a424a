// A drawing of the nodes around one attention: inputs above, results below.

const BOX = { width: 150, height: 38, across: 156, down: 66, margin: 8 };
const MOST_NODES = 40;

/** Names to draw for a site in a state of its graph, and which of them are its own. */
function neighbourhood(graph, site, stateName) {
  const state = open(graph)[stateName];
  const change = graph.changes[site.attention];
  if (!change) {
    const all = around(state, site.attention);
    for (const name of culprits(graph, site)) all.add(name);
    return { state, own: new Set([site.attention]), all };
  }
  const names = stateName === "before" ? change.removed : change.added;
  const own = new Set(names.filter((name) => state.byName.has(name)));
  if (stateName === "before") own.add(site.attention);
  const all = new Set(own);
  for (const name of own) for (const input of inputsOf(state, name)) all.add(input);
  for (const name of own) for (const user of state.byName.get(name).users) all.add(user);
  return { state, own, all: new Set([...all].slice(0, MOST_NODES)) };
}

function inputsOf(state, name) {
  return state.byName.get(name).inputs.map((input) => input.name);
}

/** An attention that stays, what it reads, where its result goes, and what meets it there. */
function around(state, attention) {
  const all = new Set([attention]);
  const grow = (names, next, depth) => {
    for (let step = 0; step < depth && all.size < MOST_NODES; step += 1) {
      names = names.flatMap(next).filter((name) => !all.has(name) && all.size < MOST_NODES && all.add(name));
    }
  };
  const users = (name) => state.byName.get(name).users.slice(0, 3);
  if (!state.byName.has(attention)) return new Set();
  grow([attention], users, 4);
  const below = [...all];
  grow([attention], (name) => inputsOf(state, name), 2);
  grow(below.filter((name) => name !== attention), (name) => inputsOf(state, name), 5);
  return all;
}

/** Names of the nodes that a decline's detail names, and of the gate and its product if they are it. */
function culprits(graph, site) {
  if (site.fused) return new Set();
  const { before } = open(graph);
  const near = around(before, site.attention);
  const named = new Set(site.detail?.match(/(?<!\ban? )\b\w+/g));
  const found = before.order.filter(
    // Elsewhere a node such as "sigmoid" is more likely to be a mere word of the sentence.
    ({ name }) => named.has(name) && (near.has(name) || /[a-z]_|\d/.test(name)),
  );
  const names = new Set(found.map((node) => node.name));
  if (site.reason.startsWith("gate-")) {
    for (const name of gating(before, site.attention)) names.add(name);
  }
  names.delete(site.attention);
  return names;
}

/** The first product behind an attention and its other factor, if there is but one way to go. */
function gating(state, attention) {
  let [arriving, node] = [null, state.byName.get(attention)];
  while (node && node.target !== "aten.mul.Tensor") {
    const users = node.users.map((name) => state.byName.get(name));
    const output = users.find((user) => user.target.endsWith("getitem") && user.args.endsWith(" 0"));
    arriving = node.name;
    node = output ?? (users.length === 1 ? users[0] : null);
  }
  return node ? [node.name, ...inputsOf(state, node.name).filter((name) => name !== arriving)] : [];
}

/** Columns and rows: a node stands above its users, and in the middle of its inputs. */
function layOut(state, all) {
  const nodes = state.order.filter((node) => all.has(node.name));
  const row = new Map();
  for (const node of [...nodes].reverse()) {
    const users = node.users.filter((name) => row.has(name));
    row.set(node.name, users.length ? 1 + Math.max(...users.map((name) => row.get(name))) : 0);
  }
  const column = columns(state, nodes, row);
  const rows = Math.max(0, ...row.values());
  const spots = new Map();
  for (const node of nodes) {
    spots.set(node.name, {
      x: BOX.margin + column.get(node.name) * BOX.across,
      y: BOX.margin + (rows - row.get(node.name)) * BOX.down,
    });
  }
  return { nodes, spots, width: Math.max(0, ...column.values()) + 1, height: rows + 1 };
}

/** Columns by name: trees of inputs stand as close to each other as their rows allow. */
function columns(state, nodes, row) {
  const seen = new Set();
  const tree = (name) => {
    seen.add(name);
    const inputs = [];
    const placed = new Map();
    for (const input of inputsOf(state, name)) {
      if (!row.has(input) || seen.has(input)) continue;
      // The line down to the node must pass beside the boxes of the rows between.
      const passed = [];
      for (let at = row.get(name) + 1; at < row.get(input); at += 1) passed.push(at);
      const grown = tree(input);
      join(placed, grown, row, new Map(passed.map((at) => [at, grown.get(input)])));
      inputs.push(placed.get(input));
    }
    return placed.set(name, inputs.length ? (inputs[0] + inputs.at(-1)) / 2 : 0);
  };
  const all = new Map();
  for (const node of nodes) if (row.get(node.name) === 0 && !seen.has(node.name)) join(all, tree(node.name), row);
  const left = Math.min(0, ...all.values());
  return new Map([...all].map(([name, at]) => [name, at - left]));
}

/** Puts `added` to the right of what is placed, by one column in the row where that is tightest. */
function join(placed, added, row, passing = new Map()) {
  const [ends, starts] = [new Map(), new Map(passing)];
  for (const [name, at] of placed) ends.set(row.get(name), Math.max(at, ends.get(row.get(name)) ?? at));
  for (const [name, at] of added) starts.set(row.get(name), Math.min(at, starts.get(row.get(name)) ?? at));
  const gaps = [...starts].filter(([at]) => ends.has(at)).map(([at, start]) => ends.get(at) + 1 - start);
  const last = Math.max(0, ...placed.values());
  const shift = gaps.length ? Math.max(...gaps) : placed.size ? last + 1 : 0;
  for (const [name, at] of added) placed.set(name, at + shift);
}

function draw(graph, site, stateName, choose) {
  const { state, own, all } = neighbourhood(graph, site, stateName);
  const { nodes, spots, width, height } = layOut(state, all);
  const replacement = graph.changes[site.attention]?.replacement;
  const what = { site, replacement, culprits: culprits(graph, site) };
  const size = [
    2 * BOX.margin + (width - 1) * BOX.across + BOX.width,
    2 * BOX.margin + (height - 1) * BOX.down + BOX.height,
  ];
  const picture = svg("svg", {
    viewBox: `0 0 ${size[0]} ${size[1]}`,
    width: size[0],
    height: size[1],
    role: "group",
    "aria-label": `${site.attention} ${stateName}`,
  });
  for (const node of nodes) picture.append(...edges(node, spots, own));
  for (const node of nodes) picture.append(drawNode(node, spots.get(node.name), own, what, choose));
  return element("div", { class: "scroll" }, picture);
}

function edges(node, spots, own) {
  const end = spots.get(node.name);
  const drawn = [];
  const labelled = own.has(node.name) && node.inputs.length > 2;
  for (const { name, role } of node.inputs) {
    const start = spots.get(name);
    if (!start) continue;
    const [x, y] = [start.x + BOX.width / 2, start.y + BOX.height];
    const [toX, bend] = [end.x + BOX.width / 2, (y + end.y) / 2];
    const path = `M${x} ${y} C${x} ${bend} ${toX} ${bend} ${toX} ${end.y}`;
    drawn.push(svg("path", { d: path, class: own.has(name) || own.has(node.name) ? "edge own" : "edge" }));
    if (labelled && role) drawn.push(svg("text", { x: x + 4, y: y + 11, class: "role" }, role));
  }
  return drawn;
}

function drawNode(node, spot, own, { site, replacement, culprits }, choose) {
  const kinds = ["node"];
  if (own.has(node.name)) kinds.push("own", site.fused ? "fused" : "declined");
  if (node.name === site.attention || node.name === replacement) kinds.push("attention");
  if (culprits.has(node.name)) kinds.push("culprit");
  const box = svg(
    "g",
    {
      class: kinds.join(" "),
      transform: `translate(${spot.x} ${spot.y})`,
      role: "button",
      "data-node": node.name,
      "aria-label": `${node.name}: ${node.target}`,
    },
    svg("title", {}, `${node.name} = ${node.target}(${node.args})`),
    svg("rect", { width: BOX.width, height: BOX.height, rx: 4 }),
    svg("text", { x: BOX.width / 2, y: 16, class: "op" }, clip(drawnName(node), 22)),
    svg("text", { x: BOX.width / 2, y: 30, class: "type" }, clip(drawnType(node), 22)),
  );
  clickable(box, () => choose(node));
  return box;
}

function drawnName(node) {
  if (node.op !== "call_function") return node.name;
  return shortTarget(node).replace(/^_?scaled_dot_product_(\w+?)_attention/, "sdpa_$1");
}

/** The first result's type, short enough for a box. */
function drawnType(node) {
  const first = node.type?.match(/^[^\]]*\]/)?.[0] ?? "";
  return first.replaceAll(" ", "").replace(/^bfloat16/, "bf16").replace(/^float(16|32|64)/, "fp$1");
}

/** Scrolls a drawing that is wider than its place to the attention, or to what replaced it. */
function centre(scroll) {
  const target = scroll.querySelector(".attention") ?? scroll.querySelector(".own");
  if (!target) return;
  const [inner, outer] = [target.getBoundingClientRect(), scroll.getBoundingClientRect()];
  scroll.scrollLeft += inner.left + inner.width / 2 - outer.left - outer.width / 2;
}

function clip(text, most) {
  return text.length > most ? `${text.slice(0, most - 1)}…` : text;
}
