// All about one attention: the decision, the drawings, the kernels.

// Shown as the verdict, or on their own below.
const ELSEWHERE = new Set(["attention", "fused", "reason", "detail", "tensors", "frames", "kernel", ...ADVICE]);
// Said more exactly by "tensors".
const COARSE = new Set(["query", "key", "value", "gate", "mask"]);

const MEANINGS = {
  ground: "why fusing is expected to pay here",
  "masked row": "what a query row gives that may look at no key: zero, nan, or the mean that a finite fill makes",
  dependent: "whether the second kernel is launched while the first one ends, which hides its start (Hopper and newer)",
};
MEANINGS["dependent launch"] = MEANINGS.dependent;

function siteDetail(graph, site) {
  const box = element("div", { class: "detail" }, verdict(site));
  if (graph.packed.length) box.append(pictures(graph, site));
  box.append(element("h4", {}, "Attention"), siteFacts(site));
  if (site.frames?.length) box.append(disclosure("Called from", () => code(site.frames.join("\n"))));
  if (site.kernel) box.append(element("h4", {}, "In one step"), savings(site.kernel));
  const kernels = graph.changes[site.attention]?.kernels;
  if (kernels) box.append(kernelDetail(kernels));
  return box;
}

function siteFacts(site) {
  const tensors = Object.entries(site.tensors ?? {});
  const plain = Object.entries(site).filter(
    ([name]) => !ELSEWHERE.has(name) && !(tensors.length && COARSE.has(name)),
  );
  return definitions([
    ...plain.map(([name, value]) => [words(name), value]),
    ...tensors.map(([name, tensor]) => [name, `${tensor.dtype}[${spell(tensor.shape)}], stride (${spell(tensor.stride)})`]),
  ], MEANINGS);
}

function savings(kernel) {
  const known = (count) => count !== null && count !== undefined;
  const change = (before, after, spelled) =>
    known(before) && known(after) ? `${spelled(before)} → ${spelled(after)}` : null;
  const box = element("div");
  box.append(definitions([
    ["bytes read", change(kernel.bytes_before, kernel.bytes_after, (count) => count.toLocaleString("en"))],
    ["launches", change(kernel.launches_before, kernel.launches_after, String)],
  ]));
  const config = Object.entries(kernel.config ?? {}).map(([name, value]) => [words(name), value]);
  if (config.length) box.append(disclosure("Configuration", () => definitions(config, MEANINGS)));
  return box;
}

function pictures(graph, site) {
  const info = element("div", { class: "chosen", "aria-live": "polite" });
  const blamed = culprits(graph, site);
  const picture = (stateName, caption) => {
    const choose = (node) => {
      const { siteOf, [stateName]: state } = open(graph);
      const concerned = blamed.has(node.name) ? site : siteOf.get(node.name);
      info.replaceChildren(nodeInfo(graph, node, concerned, state));
    };
    return element("figure", {}, element("figcaption", {}, caption), draw(graph, site, stateName, choose));
  };
  const drawn = site.fused
    ? [picture("before", "Before"), picture("after", "After")]
    : [picture("before", `As it was, before and after${blamed.size ? "; dashed: what the reason is about" : ""}`)];
  return element("div", {}, element("div", { class: "pictures" }, ...drawn), info);
}

function kernelDetail(kernels) {
  const box = element("div", {}, element("h4", {}, "Kernels"));
  if (!kernels.runs) {
    box.append(
      element("p", { class: "quiet" }, "On this device the operator runs as a torch reference, or as these kernels under Triton's interpreter."),
    );
  }
  for (const launch of kernels.launches) box.append(launchDetail(kernels, launch));
  if (!kernels.launches.length) {
    box.append(definitions([["configuration", kernels.config]]));
    box.append(element("p", { class: "quiet" }, "Triton is not installed, so there is no source."));
  }
  return box;
}

function launchDetail(kernels, launch) {
  const functions = data.sources[launch.source] ?? [];
  const body = functions.find((part) => part.name === launch.kernel);
  const launched = new Set(kernels.launches.map((other) => other.kernel));
  const helpers = functions.filter((part) => !launched.has(part.name));
  const box = element(
    "section",
    { class: "launch" },
    element("h5", {}, element("code", {}, launch.kernel)),
    definitions([["grid", launch.grid.join(" × ")], ...Object.entries(launch.options).map(([name, value]) => [words(name), value])], MEANINGS),
    disclosure("Compile-time arguments", () => definitions(Object.entries(launch.constexpr), MEANINGS)),
    disclosure("Run-time arguments, strides as traced", () => definitions(Object.entries(launch.arguments))),
  );
  if (body) box.append(disclosure("Source", () => code(body.code), { class: "source" }));
  if (helpers.length) {
    box.append(disclosure("Source of what it calls", () => code(helpers.map((part) => part.code).join("\n\n"))));
  }
  return box;
}

function code(text) {
  return element("pre", {}, element("code", {}, text));
}
