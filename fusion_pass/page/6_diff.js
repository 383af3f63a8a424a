// A graph before and after, side by side; long unchanged stretches are folded.

const CONTEXT = 2;
const FOLD_FROM = 7;

/** Rows of (node before, node after); a node that is in both states stands in one row. */
function align({ before, after }) {
  const rows = [];
  let [left, right] = [[], []];
  const flush = () => {
    for (let i = 0; i < Math.max(left.length, right.length); i += 1) {
      rows.push({ before: left[i] ?? null, after: right[i] ?? null, kind: "differs" });
    }
    [left, right] = [[], []];
  };
  let [i, j] = [0, 0];
  while (i < before.order.length || j < after.order.length) {
    const [old, now] = [before.order[i], after.order[j]];
    if (old && (!now || !after.byName.has(old.name))) { left.push(old); i += 1; }
    else if (now && (!old || !before.byName.has(now.name))) { right.push(now); j += 1; }
    else if (old.name === now.name) {
      flush();
      rows.push({ before: old, after: now, kind: old.index === now.index ? "same" : "rewired" });
      i += 1;
      j += 1;
    } else { left.push(old); right.push(now); i += 1; j += 1; }
  }
  flush();
  return rows;
}

function diff(graph) {
  const opened = open(graph);
  const rows = align(opened);
  const interesting = rows.map((row) => row.kind !== "same" || opened.siteOf.has(row.before.name));
  const near = rows.map((_, at) => interesting.slice(Math.max(0, at - CONTEXT), at + CONTEXT + 1).some(Boolean));
  const box = element("div", { class: "diff" });
  const legend = "− fused away, + put in its place, ~ reads it now; click a node for more";
  box.append(element("p", { class: "legend quiet" }, legend));
  box.append(element("div", { class: "line head" }, element("span", {}, "Before"), element("span", {}, "After")));
  let at = 0;
  while (at < rows.length) {
    let end = at;
    while (end < rows.length && near[end] === near[at]) end += 1;
    const block = rows.slice(at, end);
    if (near[at] || block.length < FOLD_FROM) box.append(lines(graph, block));
    else box.append(fold(graph, block));
    at = end;
  }
  return box;
}

function lines(graph, rows) {
  return element("div", { class: "block" }, ...rows.map((row) => line(graph, row)));
}

function fold(graph, rows) {
  const button = element("button", { type: "button", class: "fold" }, `${rows.length} unchanged nodes`);
  button.addEventListener("click", () => button.replaceWith(lines(graph, rows)));
  return button;
}

function line(graph, row) {
  const made = element("div", { class: `line ${row.kind}` });
  made.append(cell(graph, row.before, "before", made), cell(graph, row.after, "after", made));
  return made;
}

function cell(graph, node, stateName, made) {
  if (!node) return element("span", { class: "none" });
  const { siteOf, [stateName]: state } = open(graph);
  const site = siteOf.get(node.name);
  const kinds = ["cell"];
  if (site) kinds.push("matched", site.fused ? "fused" : "declined");
  const drawn = element(
    "span",
    { class: kinds.join(" "), "data-node": node.name, role: "button" },
    element("b", {}, node.name),
    ` ${node.op === "call_function" ? `= ${node.target}(${node.args})` : node.op} `,
    element("i", {}, node.type ?? ""),
  );
  if (site && !site.fused) drawn.append(element("em", { class: "tag" }, site.reason));
  return clickable(drawn, () => toggleInfo(graph, node, site, state, made));
}

function toggleInfo(graph, node, site, state, made) {
  const shown = made.nextElementSibling;
  const is = shown?.classList.contains("info");
  const same = is && shown.dataset.node === node.name;
  if (is) shown.remove();
  if (!same) made.after(nodeInfo(graph, node, site, state));
}
