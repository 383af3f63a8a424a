// The page: headline, filters and one section for each graph.

const chosen = { outcome: "all", reason: "", text: "" };
const sites = data.graphs.flatMap((graph) => graph.sites);
const searched = new Map(sites.map((site) => [site, JSON.stringify(Object.values(site)).toLowerCase()]));
const fused = sites.filter((site) => site.fused).length;

function section(graph) {
  const made = element(
    "section",
    { class: "graph" },
    element("h3", {}, graph.title, element("span", { class: "quiet" }, graph.summary)),
    table(graph),
  );
  if (graph.packed.length) {
    const changed = Object.keys(graph.changes).length > 0;
    const title = changed ? "The graph before and after" : "The graph, which was left as it was";
    made.append(disclosure(title, () => diff(graph), { class: "graphs" }));
  } else {
    made.append(element("p", { class: "quiet" }, graph.note));
  }
  graph.section = made;
  return made;
}

/** A section for each run, with those of its graphs. */
function runSections() {
  const runs = Map.groupBy(data.graphs, (graph) => graph.run);
  return [...runs].map(([title, graphs]) => {
    const count = `${graphs.length} ${graphs.length === 1 ? "graph" : "graphs"}`;
    const heading = element("h2", {}, title, element("span", { class: "quiet" }, count));
    return element("section", { class: "run" }, heading, ...graphs.map(section));
  });
}

/** Opens the attention that a reader most likely came for: the first that was declined. */
function openFirst() {
  const all = data.graphs.flatMap((graph) => graph.sites.map((site) => [graph, site]));
  const first = all.find(([, site]) => !site.fused) ?? all[0];
  if (first) toggleSite(...first);
}

function matches(site) {
  if (chosen.outcome !== "all" && site.fused !== (chosen.outcome === "fused")) return false;
  if (chosen.reason && site.reason !== chosen.reason) return false;
  return searched.get(site).includes(chosen.text);
}

function applyFilters() {
  let count = 0;
  for (const graph of data.graphs) {
    let inGraph = 0;
    for (const site of graph.sites) {
      const shown = matches(site);
      const row = rows.get(site);
      row.hidden = !shown;
      const detail = row.nextElementSibling;
      if (detail?.classList.contains("opened")) detail.hidden = !shown;
      inGraph += shown;
    }
    graph.section.hidden = !inGraph;
    count += inGraph;
  }
  for (const run of document.querySelectorAll("section.run")) {
    run.hidden = !run.querySelector("section.graph:not([hidden])");
  }
  document.getElementById("shown").value = `${count} of ${sites.length} shown`;
}

function outcomeButton([name, count]) {
  const button = element("button", { type: "button", "data-outcome": name, "aria-pressed": String(name === chosen.outcome) }, `${name} ${count}`);
  button.addEventListener("click", () => {
    chosen.outcome = name;
    for (const other of button.parentElement.children) other.setAttribute("aria-pressed", String(other === button));
    applyFilters();
  });
  return button;
}

function makeFilters() {
  const counts = [["all", sites.length], ["fused", fused], ["declined", sites.length - fused]];
  document.getElementById("outcomes").append(...counts.map(outcomeButton));
  const reasons = new Map();
  for (const site of sites) if (!site.fused) reasons.set(site.reason, 1 + (reasons.get(site.reason) ?? 0));
  const select = document.getElementById("reasons");
  select.append(element("option", { value: "" }, "any"));
  for (const [reason, count] of [...reasons].sort()) select.append(element("option", { value: reason }, `${reason} (${count})`));
  select.addEventListener("input", () => { chosen.reason = select.value; applyFilters(); });
  const text = document.getElementById("text");
  text.addEventListener("input", () => { chosen.text = text.value.trim().toLowerCase(); applyFilters(); });
  document.getElementById("filters").addEventListener("submit", (event) => event.preventDefault());
}

document.getElementById("headline").textContent = sites.length
  ? `${fused} of ${sites.length} attentions fused`
  : "No attention in any graph";
document.getElementById("versions").textContent = [data.extent, data.versions].join("; ");
document.getElementById("notes").append(...data.notes.map((note) => element("p", {}, note)));
document.getElementById("graphs").append(...runSections());
document.getElementById("filters").hidden = !sites.length;
makeFilters();
openFirst();
applyFilters();
