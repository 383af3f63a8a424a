// The table of a graph's attentions.

const COLUMNS = [
  ["Attention", (site) => [element("b", {}, site.attention), element("span", { class: "quiet" }, site.producer)]],
  ["Where", (site) => [site.module && element("span", {}, site.module), ...callers(site).map(place)]],
  ["Query, key, value", (site) => [element("code", {}, spellShape(site.query)), element("code", {}, spellShape(site.key)), element("code", {}, spellShape(site.value))]],
  ["Gate, mask", (site) => [element("code", {}, operand(site, "gate")), element("code", {}, operand(site, "mask"))]],
  ["Result", (site) => [outcome(site)]],
];

const rows = new Map();

/** The line of the module's own code, and the innermost one if that is another. */
function callers(site) {
  const own = (site.frames ?? []).filter((call) => call.endsWith(" in forward")).at(-1);
  return [...new Set([own?.replace(/ in forward$/, ""), site.source])].filter(Boolean);
}

function spellShape(shape) {
  return typeof shape === "string" ? shape : shape ? spell(shape) : "";
}

/** A gate or a mask, or as much as is known of one that was not understood. */
function operand(site, name) {
  const [shape, kind] = [spellShape(site[name]), site[`${name}_kind`]];
  if (shape) return shape;
  return kind && kind !== "none" ? `${kind} ${name}` : `no ${name}`;
}

function outcome(site) {
  return element("span", { class: `outcome ${site.fused ? "fused" : "declined"}` }, site.fused ? "fused" : site.reason);
}

function table(graph) {
  const head = element("tr", {}, ...COLUMNS.map(([title]) => element("th", { scope: "col" }, title)));
  const body = element("tbody");
  for (const site of graph.sites) {
    const row = siteRow(graph, site);
    rows.set(site, row);
    body.append(row);
  }
  return element("table", {}, element("thead", {}, head), body);
}

function siteRow(graph, site) {
  const cells = COLUMNS.map(([title, fill]) => element("td", { "data-title": title }, element("div", {}, ...fill(site))));
  const row = element("tr", { class: "site", "aria-expanded": "false", "data-attention": site.attention }, ...cells);
  return clickable(row, () => {
    if (!getSelection().toString()) toggleSite(graph, site);
  });
}

function toggleSite(graph, site) {
  const row = rows.get(site);
  const opened = row.getAttribute("aria-expanded") === "true";
  row.setAttribute("aria-expanded", String(!opened));
  if (opened) {
    row.nextElementSibling.remove();
    return;
  }
  const inside = element("td", { colspan: COLUMNS.length }, siteDetail(graph, site));
  row.after(element("tr", { class: "opened" }, inside));
  inside.querySelectorAll(".scroll").forEach(centre);
}
