// What is known of one node, and of the site that it belongs to.

function nodeInfo(graph, node, site, state) {
  const facts = [
    ["target", node.target],
    ["arguments", node.args],
    ["result", node.type],
    ["stride", node.stride],
    ["device", node.device],
    ["module", node.module],
    ["source", node.source],
    ["used by", state.byName.get(node.name)?.users.join(", ") || "nothing"],
  ];
  const box = element("div", { class: "info", "data-node": node.name });
  box.append(element("p", {}, element("b", {}, node.name)));
  if (site) box.append(belonging(graph, node, site));
  box.append(definitions(facts));
  return box;
}

function belonging(graph, node, site) {
  const change = graph.changes[site.attention];
  if (!site.fused) return verdict(site);
  const text = change.added.includes(node.name)
    ? `Put here by the fusion of ${site.attention}.`
    : `Fused into ${change.replacement}, with the attention ${site.attention}.`;
  return element("p", { class: "verdict fused" }, text);
}

/** The decision on a site; for a decline its reason, and all that the report says of it. */
function verdict(site) {
  if (site.fused) {
    return element("p", { class: "verdict fused" }, element("b", {}, "fused"));
  }
  const box = element("div", { class: "verdict declined" });
  box.append(element("p", {}, element("b", { class: "reason" }, site.reason), ` ${site.detail}`));
  box.append(definitions(ADVICE.map((name) => [words(name), site[name]])));
  return box;
}

const ADVICE = ["found", "expected", "meaning", "remedy"];
