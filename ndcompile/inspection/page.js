// ------------------------------------------------------------- the top part

const PARAMETERS = sum(REPORT.parameters, (row) => row.fqns.length * product(row.shape));
const LOCAL = sum(REPORT.parameters, (row) => row.fqns.length * product(row.local_shape));
const SENT = sum(REPORT.collectives, (row) => row.sent);
const CALLS = sum(REPORT.collectives, (row) => row.count);

function drawTop() {
  document.title = `${REPORT.model}: sharding plan`;
  at("model").textContent = REPORT.model;
  const axes = shownAxes().filter((axis) => !["ep_rest", "efsdp"].includes(axis));
  at("setting").replaceChildren(
    h("span", {}, plural(RANKS, "rank")),
    ...axes.map((axis) => h("span", {}, axisName(axis), ` ${SIZE[axis]}`)),
    h("span", {}, `batch ${digits(REPORT.batch_size, 0)} × ${digits(REPORT.seq_len, 0)} tokens on each data rank`),
  );
  at("summary").textContent = summary();
  at("facts").replaceChildren(...facts().map(([name, kind, value, note]) => drawFact(name, kind, value, note)));
}

function summary() {
  const peak = figure(REPORT.memory, "peak");
  const step = figure(REPORT.time, "step");
  const parts = [`Each rank stores ${amount(LOCAL)} of ${amount(PARAMETERS)} parameters`];
  if (CALLS) parts.push(`sends ${text("bytes", SENT)} in ${plural(CALLS, "collective")} a step`);
  if (peak) parts.push(`needs ${text("bytes", peak.value)} at its peak`);
  const last = parts.pop();
  const sentence = `${parts.length ? `${parts.join(", ")} and ` : ""}${last}.`;
  return step ? `${sentence} A training step is estimated to take ${text("seconds", step.value)}.` : sentence;
}

function facts() {
  const shown = [["parameters", "count", PARAMETERS, `${amount(LOCAL)} on a rank`]];
  const peak = figure(REPORT.memory, "peak");
  if (peak) shown.push(["peak memory", "bytes", peak.value, "of one rank"]);
  if (CALLS) shown.push(["sent", "bytes", SENT, `${plural(CALLS, "collective")} a step`]);
  const flops = sum(REPORT.compute.filter((item) => figureKind("compute", item) === "flops"), (item) => item.value);
  if (flops) shown.push(["compute", "flops", flops, "of one rank a step"]);
  const step = figure(REPORT.time, "step");
  const exposed = figure(REPORT.time, "exposed communication");
  const share = step && exposed && `${text("share", exposed.value / step.value)} waits for communication`;
  if (step) shown.push(["step", "seconds", step.value, share || "estimated"]);
  return shown;
}

function drawFact(name, kind, value, note) {
  const [number, unit] = kind === "count" ? amount(value).split(" ") : units[kind](value);
  return h(
    "div",
    {},
    h("dt", {}, name),
    h("dd", {}, h("b", {}, number), " ", h("i", {}, unit || "")),
    h("dd", { class: "note" }, note),
  );
}

/** How to write a figure: what its list and its name say about the unit. */
function figureKind(list, item) {
  if (/\b(share|fraction|ratio|efficiency|percent)\b/.test(item.name)) return "share";
  if (list === "memory") return "bytes";
  return list === "compute" && /flop|floating point/i.test(item.name) ? "flops" : "seconds";
}

// --------------------------------------------------------- the mesh, drawn

/** The mesh as a grid: columns tp and rows fsdp (fsdp across where there is no tp); a panel a copy, while they fit. */
function drawMesh(options) {
  const flat = SIZE.tp === 1;
  const columns = sample(flat ? SIZE.fsdp : SIZE.tp, options.columns);
  const rows = sample(flat ? 1 : SIZE.fsdp, options.rows);
  const shown = SIZE.dp_replicate * rows.length <= options.rows ? SIZE.dp_replicate : 1;
  const panels = Array.from({ length: shown }, (_, copy) => drawPanel(copy, rows, columns, flat, options));
  const box = h("div", { class: `mesh ${options.small ? "small" : ""}` }, panels, moreCopies(shown));
  roveFocus(box);
  return box;
}

function moreCopies(shown) {
  const more = SIZE.dp_replicate - shown;
  if (!more) return null;
  const ranks = `ranks ${rankAt(shown, 0, 0)}–${RANKS - 1}`;
  return h("p", { class: "more" }, `and ${plural(more, "more copy", "more copies")} alike: `, ranks);
}

function drawPanel(copy, rows, columns, flat, options) {
  const heads = columns.map((c) => h("span", { class: "head" }, c === null ? "⋯" : String(c)));
  const lines = rows.map((row, i) => drawLine(copy, row, rows[i - 1], columns, flat, options));
  return h(
    "div",
    { class: "panel" },
    SIZE.dp_replicate > 1 && h("p", { class: "panel-title" }, axisName("dp_replicate"), ` ${copy}`),
    h(
      "div",
      { class: "grid", style: { "--columns": columns.length } },
      h("span", { class: "corner" }, meshCorner(flat)),
      heads,
      lines,
    ),
  );
}

function meshCorner(flat) {
  if (!flat) return [SIZE.fsdp > 1 && [axisName("fsdp"), " ↓ "], axisName("tp"), " →"];
  return SIZE.fsdp > 1 ? [axisName("fsdp"), " →"] : "";
}

/** A row of ranks. Rows of one expert group stand together, so a group's first row is set off. */
function drawLine(copy, row, before, columns, flat, options) {
  const grouped = !flat && SIZE.ep > 1 && SIZE.ep_rest > 1 && SIZE.efsdp > 1;
  const apart = grouped && before !== undefined && (row === null || row % SIZE.ep_rest === 0) ? "apart" : "";
  const head = flat || SIZE.fsdp === 1 ? "" : row === null ? "⋮" : String(row);
  const cells = columns.map((column) => {
    if (row === null || column === null) return h("span", { class: `gap ${apart}` }, row === null ? "⋮" : "⋯");
    return drawRank(flat ? rankAt(copy, column, 0) : rankAt(copy, row, column), apart, options);
  });
  return [h("span", { class: `head line ${apart}` }, head), cells];
}

function drawRank(rank, apart, options) {
  const place = placeOf(rank);
  const where = shownAxes().map((axis) => `${axis} ${place[axis]}`).join(", ");
  return h(
    "button",
    {
      class: `rank ${apart}`,
      "data-rank": rank,
      title: where,
      "aria-label": `rank ${rank}: ${where || "the only one"}`,
      onclick: () => options.pick(rank),
    },
    String(rank),
  );
}

/** One tab stop for a grid of buttons; arrow keys move inside it. */
function roveFocus(box) {
  const cells = [...box.querySelectorAll("button.rank")];
  cells.forEach((cell, i) => (cell.tabIndex = i ? -1 : 0));
  box.addEventListener("keydown", (event) => {
    const next = nearest(cells, document.activeElement, event.key);
    if (!next) return;
    event.preventDefault();
    cells.forEach((cell) => (cell.tabIndex = cell === next ? 0 : -1));
    next.focus();
  });
}

const ARROWS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };

/** The closest cell in the direction of an arrow key. */
function nearest(cells, from, key) {
  if (!ARROWS[key] || !cells.includes(from)) return null;
  const [dx, dy] = ARROWS[key];
  const middle = (cell) => {
    const box = cell.getBoundingClientRect();
    return [box.x + box.width / 2, box.y + box.height / 2];
  };
  const [x, y] = middle(from);
  let best = null;
  for (const cell of cells) {
    const [cx, cy] = middle(cell);
    const ahead = (cx - x) * dx + (cy - y) * dy;
    const aside = Math.abs((cx - x) * dy) + Math.abs((cy - y) * dx);
    if (ahead > 1 && (!best || ahead + 4 * aside < best.cost)) best = { cell, cost: ahead + 4 * aside };
  }
  return best && best.cell;
}

/** Colour every drawn rank: `index(rank)` of `count`, the same colour for the same index. */
function paint(box, index, count, marked) {
  for (const cell of box.querySelectorAll("button.rank")) {
    const i = index(Number(cell.dataset.rank));
    cell.classList.toggle("painted", i !== null);
    cell.style.setProperty("--hue", i === null ? 0 : shade(i, count));
    const rank = Number(cell.dataset.rank);
    cell.setAttribute("aria-pressed", String(marked(rank)));
  }
}

/** A place on the colour ramp, 0 to 1. */
function shade(i, count) {
  return count > 1 ? (i / (count - 1)).toFixed(4) : "0.3000";
}

function axisName(axis) {
  return h("span", { class: "axis", style: { "--axis": `var(--${axis})` } }, axis);
}

// -------------------------------------------------------- section: the mesh

const LEGEND = [
  ["S(d)", "Sharded: every rank of the axis holds its own slice of dimension d (the first one is 0)."],
  ["S(d) x n", "Sharded in n parts: n tensors packed along dimension d, each cut by itself."],
  ["R", "Replicated: every rank holds all of it, but uses it on other data, so its gradients must be summed."],
  ["I", "Invariant: every rank computes the same value and the same gradient, so nothing is exchanged."],
  ["P", "Partial: every rank holds one term, and the value is the sum over the axis."],
];

let meshAxis = null;
let meshRank = 0;

function drawMeshSection() {
  const legend = LEGEND.map(([sign, meaning]) => h("div", {}, h("dt", {}, chip(sign)), h("dd", {}, meaning)));
  at("legend").replaceChildren(...legend);
  at("axes").replaceChildren(...shownAxes().map(describeAxis));
  at("axes").parentElement.hidden = RANKS === 1;
  at("axis-choice").replaceChildren(...shownAxes().map((axis) =>
    h("button", { "data-axis": axis, onclick: () => showGroups(meshAxis === axis ? null : axis) }, axisName(axis)),
  ));
  const pick = (rank) => {
    meshRank = rank;
    showGroups(meshAxis);
  };
  at("mesh-picture").replaceChildren(drawMesh({ columns: 8, rows: 10, pick }));
  showGroups(null);
}

function describeAxis(axis) {
  const parts = SIZE.ep > 1 && FUSED[axis] ? FUSED[axis].filter((part) => SIZE[part] > 1) : [];
  const made = parts.length > 1 ? ` ${axis} = ${parts.map((part) => `${part} ${SIZE[part]}`).join(" × ")}.` : "";
  return h("div", {}, h("dt", {}, axisName(axis), h("b", {}, String(SIZE[axis]))), h("dd", {}, AXES[axis] + made));
}

/** Mark the ranks that talk to the chosen one along `axis`, one colour a group. */
function showGroups(axis) {
  meshAxis = axis;
  const keys = axis ? [...new Set(allRanks().map((rank) => groupKey(rank, axis)))] : [];
  const box = at("mesh-picture").firstElementChild;
  paint(box, (rank) => (axis ? keys.indexOf(groupKey(rank, axis)) : null), keys.length, (rank) => rank === meshRank);
  for (const button of at("axis-choice").children) {
    button.setAttribute("aria-pressed", String(button.dataset.axis === axis));
  }
  at("mesh-caption").replaceChildren(...meshCaption(axis, keys.length));
}

function meshCaption(axis, groups) {
  const place = placeOf(meshRank);
  const where = shownAxes().flatMap((name, i) => [i ? ", " : " is at ", axisName(name), ` ${place[name]}`]);
  const apart = SIZE.tp > 1 && SIZE.ep_rest > 1 && SIZE.efsdp > 1;
  const blocks = apart ? " Rows that stand together are one expert group." : "";
  if (!axis) return [`Rank ${meshRank}`, ...where, `.${blocks}`];
  const others = groupOf(meshRank, axis).filter((rank) => rank !== meshRank);
  const along = `${plural(groups, "group")} of ${SIZE[axis]}, one colour each. Rank ${meshRank} talks to `;
  return [axisName(axis), `: ${along}${spellRanks(others)}.`];
}

function chip(placement, axis) {
  const whole = placement === "R" && axis;
  const style = axis ? { "--axis": `var(--${axis})` } : {};
  return h("span", { class: `chip ${axis ? "on-axis" : ""} ${whole ? "whole" : ""}`, style }, placement);
}

// --------------------------------------------------- sections: memory, time

function drawMemory() {
  const parts = REPORT.memory.filter((item) => !item.name.startsWith("peak"));
  const peak = REPORT.memory.filter((item) => item.name.startsWith("peak"));
  const scale = Math.max(sum(parts, (item) => item.value), ...peak.map((item) => item.value), 1);
  let from = 0;
  const bars = parts.map((item) => {
    const bar = drawBar("memory", item, from / scale, item.value / scale, `var(--part-${partName(item)})`);
    from += item.value;
    return bar;
  });
  const whole = peak.map((item) => drawBar("memory", item, 0, item.value / scale, "var(--part-peak)", "total"));
  at("memory-bars").replaceChildren(barHead(), ...bars, ...whole);
}

function partName(item) {
  return ["parameters", "gradients", "optimizer", "activations"].find((name) => item.name.startsWith(name)) || "other";
}

function barHead() {
  const titles = ["", "", "", "how this was computed"];
  return h("div", { class: "figure bar-heads", "aria-hidden": "true" }, titles.map((title) => h("span", {}, title)));
}

function drawBar(list, item, from, width, colour, kind = "") {
  const style = { "--from": `${100 * from}%`, "--width": `${100 * width}%`, "--fill": colour };
  return h(
    "div",
    { class: `figure ${kind}` },
    h("span", { class: "label" }, item.name),
    h("span", { class: width === null ? "no-track" : "track" }, width !== null && h("span", { class: "fill", style })),
    measure(figureKind(list, item), item.value),
    h("span", { class: "formula" }, item.formula),
  );
}

function drawTime() {
  const timed = [...REPORT.compute.map((item) => ["compute", item]), ...REPORT.time.map((item) => ["time", item])];
  const seconds = timed.filter(([list, item]) => figureKind(list, item) === "seconds");
  const scale = Math.max(...seconds.map(([, item]) => item.value), 1e-30);
  const bars = timed.map(([list, item]) => {
    const kind = figureKind(list, item);
    const width = kind === "seconds" ? item.value / scale : kind === "share" ? item.value : null;
    const total = item.name === "step" ? "total" : "";
    return drawBar(list, item, 0, width === null ? null : Math.min(width, 1), timeColour(list, item), total);
  });
  at("time-bars").replaceChildren(barHead(), ...bars);
  if (REPORT.critical_path.length) drawPath();
  at("time").hidden = !timed.length && !REPORT.critical_path.length;
}

function timeColour(list, item) {
  if (list === "compute" || /comput/.test(item.name)) return "var(--compute)";
  if (/communication|exposed/.test(item.name)) return "var(--wire)";
  return item.name === "optimizer" ? "var(--part-optimizer)" : "var(--part-peak)";
}

/** Colour of a stretch of the path: compute, or the axis of its collective. */
function pathColour(what) {
  const axis = what.split(/[^a-z_]+/).find((word) => word in AXES);
  return axis ? `var(--${axis})` : what === "compute" ? "var(--compute)" : "var(--wire)";
}

function drawPath() {
  const steps = REPORT.critical_path;
  const whole = sum(steps, (step) => step.seconds) || 1;
  let x = 0;
  const strip = steps.map((step) => {
    const width = (1000 * step.seconds) / whole;
    const label = `${step.what} · ${step.module} · ${step.phase} · ${text("seconds", step.seconds)}`;
    const style = { fill: pathColour(step.what) };
    const bar = svg("rect", { x, y: 0, width, height: 40, style }, svg("title", {}, label));
    x += width;
    return bar;
  });
  at("path").replaceChildren(
    h("h3", {}, "Critical path"),
    h("p", { class: "intro" }, "The longest chain of work in which each link waits for the one before: it makes ",
      `the step as long as it is. ${plural(steps.length, "stretch", "stretches")}, from left to right; `,
      "the line marks where backward begins."),
    svg("svg", { class: "strip", viewBox: "0 0 1000 40", preserveAspectRatio: "none", role: "img",
      "aria-label": "The critical path as a strip, in the colours of the list below" }, strip, phaseMark(steps, whole)),
    h("div", { class: "path-sums" }, pathSums(steps, whole)),
    longest(steps, whole),
  );
}

/** Where backward begins. */
function phaseMark(steps, whole) {
  const first = steps.findIndex((step) => step.phase === "backward");
  if (first < 1) return null;
  const x = (1000 * sum(steps.slice(0, first), (step) => step.seconds)) / whole;
  return svg("line", { x1: x, x2: x, y1: 0, y2: 40, class: "mark" }, svg("title", {}, "backward begins"));
}

function pathSums(steps, whole) {
  const sums = new Map();
  for (const step of steps) sums.set(step.what, (sums.get(step.what) || 0) + step.seconds);
  return [...sums].sort((a, b) => b[1] - a[1]).map(([what, seconds]) =>
    h(
      "div",
      {},
      h("span", { class: "dot", style: { "--fill": pathColour(what) } }),
      h("span", {}, what),
      measure("seconds", seconds),
      measure("share", seconds / whole),
    ),
  );
}

function longest(steps, whole) {
  const shown = [...steps].sort((a, b) => b.seconds - a.seconds).slice(0, 20);
  const table = h("table", { class: "rows" });
  fillTable(table, [
    ["work", (s) => h("span", {}, h("span", { class: "dot", style: { "--fill": pathColour(s.what) } }), s.what)],
    ["module", (s) => h("code", {}, s.module)],
    ["phase", (s) => s.phase],
    ["time", (s) => measure("seconds", s.seconds), "number"],
    ["share", (s) => measure("share", s.seconds / whole), "number"],
  ], shown);
  const title = shown.length < steps.length ? `The longest ${shown.length} of ${steps.length}` : "All stretches";
  return h("details", {}, h("summary", {}, title), table);
}

// ----------------------------------------------------- section: parameters

let picked = null;

/** A tree of {name, children, row}; a module with one child is one line with it. */
function buildTree() {
  const root = { name: "", children: new Map(), row: null };
  REPORT.parameters.forEach((row, index) => {
    let node = root;
    const parts = row.name.split(".");
    parts.forEach((part, i) => {
      const key = i === parts.length - 1 ? `${part}#${index}` : part;
      if (!node.children.has(key)) node.children.set(key, { name: part, children: new Map(), row: null });
      node = node.children.get(key);
    });
    node.row = row;
  });
  return root;
}

function folded(node) {
  let { name } = node;
  while (!node.row && node.children.size === 1) {
    [node] = node.children.values();
    name = `${name}.${node.name}`;
  }
  return { name, children: node.children, row: node.row };
}

function drawTree() {
  const tree = at("tree");
  const whole = STORAGE.filter((axis) => !CUT.includes(axis));
  at("whole").replaceChildren(...(whole.length ? wholeAxes(whole) : []));
  const packed = (axis) => REPORT.parameters.some((row) => (row.placements[axis] || "").includes(" x "));
  tree.style.setProperty("--places", CUT.map((axis) => (packed(axis) ? "72px" : "50px")).join(" "));
  const nodes = [...buildTree().children.values()].map((node) => drawNode(folded(node), 0));
  tree.replaceChildren(treeHead(), ...nodes);
  at("open-all").onclick = () => openTree(true);
  at("close-all").onclick = () => openTree(false);
}

function wholeAxes(axes) {
  const names = axes.flatMap((axis, i) => [i ? " and " : "", axisName(axis)]);
  return [" All of them are whole on every rank of ", ...names, "."];
}

function treeHead() {
  return h(
    "div",
    { class: "row heads", "aria-hidden": "true" },
    h("span", { class: "name" }, "name"),
    CUT.map((axis) => h("span", { class: "place" }, axisName(axis))),
    h("span", { class: "shape" }, "global shape"),
    h("span", { class: "shape" }, "on a rank"),
    h("span", { class: "dtype" }, "dtype"),
    h("span", { class: "size" }, "per rank"),
  );
}

function drawNode(node, depth) {
  if (node.row) return drawLeaf(node, depth);
  const children = [...node.children.values()].map((child) => drawNode(folded(child), depth + 1));
  const rows = rowsBelow(node);
  const count = sum(rows, (row) => row.fqns.length * product(row.shape));
  const bytes = sum(rows, (row) => row.fqns.length * localBytes(row));
  const summary = h(
    "summary",
    { class: "row module", style: { "--depth": depth } },
    h("span", { class: "name" }, dotted(node.name)),
    h("span", { class: "about" }, `${amount(count)} parameters`),
    h("span", { class: "size" }, measure("bytes", bytes)),
  );
  return h("details", { open: true, class: "node" }, summary, children);
}

function rowsBelow(node) {
  return node.row ? [node.row] : [...node.children.values()].flatMap(rowsBelow);
}

/** A name that may break after its dots. */
function dotted(name) {
  return name.split(".").flatMap((part, i) => (i ? [".", h("wbr"), part] : [part]));
}

function drawLeaf(node, depth) {
  const { row } = node;
  const copies = row.fqns.length;
  const also = row.aliases.map((alias) => `also ${alias}`);
  const leaf = h(
    "div",
    { class: "row leaf", style: { "--depth": depth }, onclick: () => pick(row, true) },
    h("span", { class: "name" }, h("button", { "aria-label": `${row.name}: ranks and slices` }, dotted(node.name))),
    CUT.map((axis) => h("span", { class: "place", "data-axis": axis }, chip(row.placements[axis] || "R", axis))),
    h("span", { class: "break" }),
    h("span", { class: "shape" }, shapeText(row.shape)),
    h("span", { class: "shape local" }, shapeText(row.local_shape)),
    h("span", { class: "dtype" }, row.dtype.replace("torch.", "")),
    h("span", { class: "size" }, measure("bytes", localBytes(row) * copies)),
    h("span", { class: "rule" }, [copies > 1 && `× ${copies}`, row.rule, ...also].filter(Boolean).join(" · ")),
  );
  searchable(leaf, "parameter", [row.name, ...row.fqns, ...row.aliases, row.rule]);
  leaf.row = row;
  return leaf;
}

function openTree(open) {
  for (const node of at("tree").querySelectorAll("details")) node.open = open;
}

/** Show the slices of `row`; `move` brings the picture into view where it does not stand beside the tree. */
function pick(row, move) {
  picked = { row, slices: distinctSlices(row) };
  for (const leaf of at("tree").querySelectorAll(".leaf")) {
    leaf.classList.toggle("picked", leaf.row === row);
    leaf.querySelector("button").setAttribute("aria-pressed", String(leaf.row === row));
  }
  drawSlices();
  if (move && at("ranks").getBoundingClientRect().bottom < 120) at("ranks").scrollIntoView({ block: "start" });
}

function drawSlices() {
  const { row, slices } = picked;
  at("slice-name").replaceChildren(...dotted(row.name));
  at("slice-about").textContent = sliceAbout(row, slices);
  at("slices-title").textContent = `All ${plural(slices.length, "slice")} and their ranks`;
  fillTable(at("slices"), [
    ["slice", (slice) => h("code", {}, sliceText(row, slice.held))],
    ["ranks", (slice) => spellRanks(slice.ranks), "number"],
  ], slices.slice(0, 256));
  at("names").hidden = row.fqns.length + row.aliases.length < 2;
  at("names").firstElementChild.textContent = `${plural(row.fqns.length, "parameter")} in this row`;
  const names = [...row.fqns, ...row.aliases.map((alias) => `also ${alias}`)];
  at("names").lastElementChild.replaceChildren(...names.map((name) => h("li", {}, h("code", {}, name))));
  showRank(Number(at("rank").value));
}

function sliceAbout(row, slices) {
  const copies = RANKS / slices.length;
  const held = copies === 1 ? "each on one rank" : Number.isInteger(copies) ? `each on ${copies} ranks` : "";
  const cut = slices.length === 1 ? "Whole on every rank" : `${plural(slices.length, "slice")}${held && `, ${held}`}`;
  const gathered = { free: "freed after forward and gathered again", keep: "kept from forward to backward" };
  const after = gathered[row.after_forward] ? ` The gathered weight is ${gathered[row.after_forward]}.` : "";
  return `${shapeText(row.shape)} ${row.dtype.replace("torch.", "")}. ${cut}.${after}`;
}

function showRank(rank) {
  const { row, slices } = picked;
  rank = Math.min(Math.max(Math.trunc(rank) || 0, 0), RANKS - 1);
  const indices = new Map(slices.flatMap((slice, i) => slice.ranks.map((r) => [r, i])));
  paint(at("slice-mesh").firstElementChild, (r) => indices.get(r), slices.length, (r) => r === rank);
  at("slice-tensor").replaceChildren(drawTensor(row, slices, indices.get(rank)));
  const place = placeOf(rank);
  at("rank").value = rank;
  at("rank-place").replaceChildren(...STORAGE.flatMap((axis) => [axisName(axis), ` ${place[axis]} `]));
  at("rank-slice").replaceChildren(...rankSlice(row, slices[indices.get(rank)], rank));
}

function rankSlice(row, slice, rank) {
  const sizes = slice.held.map((ranges) => sum(ranges, ([start, stop]) => stop - start));
  const bytes = product(sizes) * itemSize(row.dtype);
  const same = slice.ranks.filter((other) => other !== rank);
  const padded = product(sizes) !== product(row.local_shape) ? ` in a buffer of ${shapeText(row.local_shape)}` : "";
  return [
    "holds ",
    h("code", {}, sliceText(row, slice.held)),
    `: ${shapeText(sizes)}, ${text("bytes", bytes)}${padded}. `,
    same.length ? `So ${same.length === 1 ? "does rank" : "do ranks"} ${spellRanks(same)}.` : "No other rank does.",
  ];
}

/** The two dims to draw: those that are cut, otherwise the first ones. */
function drawnDims(row) {
  const cut = new Set(STORAGE.map((axis) => parsePlacement(row.placements[axis])).filter(Boolean).map((s) => s.dim));
  const dims = [...cut].sort();
  for (let dim = 0; dim < row.shape.length && dims.length < 2; dim++) if (!dims.includes(dim)) dims.push(dim);
  return dims.slice(0, 2).sort();
}

/** The tensor as a rectangle: the first drawn dim downwards, the second across, slices in their colours. */
function drawTensor(row, slices, chosen) {
  const [down, across] = drawnDims(row);
  const flat = across === undefined;
  const height = flat ? 44 : 150;
  const span = (held, dim, length) =>
    dim === undefined ? [[0, length]] : held[dim].map((range) => range.map((i) => (i / row.shape[dim]) * length));
  const rects = slices.slice(0, 4096).flatMap((slice, i) => {
    const ys = flat ? [[0, height]] : span(slice.held, down, height);
    const xs = flat ? span(slice.held, down, 300) : span(slice.held, across, 300);
    return ys.flatMap(([top, bottom]) => xs.map(([left, right]) =>
      svg("rect", { x: left, y: top, width: right - left, height: bottom - top, "data-slice": i,
        class: i === chosen ? "slice chosen" : "slice", style: { "--hue": shade(i, slices.length) } },
      svg("title", {}, `${sliceText(row, slice.held)}: ranks ${spellRanks(slice.ranks)}`))));
  });
  rects.sort((a, b) => a.classList.contains("chosen") - b.classList.contains("chosen"));
  const rest = row.shape.map((size, dim) => [dim, size]).filter(([dim]) => dim !== down && dim !== across);
  return h(
    "figure",
    { class: "tensor" },
    svg("svg", { viewBox: `-1 -1 302 ${height + 2}`, role: "img", "aria-label": "The tensor and its slices" }, rects),
    h("figcaption", {}, tensorCaption(row, down, across, rest)),
  );
}

function tensorCaption(row, down, across, rest) {
  if (down === undefined) return "a scalar";
  const first = across === undefined ? `→ dim ${down}: ${row.shape[down]}` : `↓ dim ${down}: ${row.shape[down]}`;
  const second = across === undefined ? "" : ` · → dim ${across}: ${row.shape[across]}`;
  return first + second + rest.map(([dim, size]) => ` · dim ${dim}: ${size}, not drawn`).join("");
}

function drawRankView() {
  const draw = drawMesh({ columns: RANKS > 999 ? 6 : 8, rows: 8, small: true, pick: showRank });
  at("slice-mesh").replaceChildren(draw);
  at("rank").max = RANKS - 1;
  at("rank").addEventListener("change", () => showRank(Number(at("rank").value)));
  const most = (row) => STORAGE.filter((axis) => parsePlacement(row.placements[axis])).length;
  const best = [...REPORT.parameters].sort((a, b) => most(b) - most(a) || b.shape.length - a.shape.length);
  const plain = best.filter((row) => row.shape.length === 2 && row.fqns.length > 1 && most(row) === most(best[0]));
  if (best.length) pick(plain.find((row) => drawnAcross(row)) || plain[0] || best[0], false);
  else at("ranks").hidden = true;
}

/** Whether a weight is cut along both dims, which makes the better first picture. */
function drawnAcross(row) {
  const dims = STORAGE.map((axis) => parsePlacement(row.placements[axis])).filter(Boolean).map((s) => s.dim);
  return new Set(dims).size > 1;
}

// ------------------------------------------------------------------ tables

/** Columns are [title, cell(row), class, sort key(row)]; a column with a key can be sorted. */
function fillTable(table, columns, rows, options = {}) {
  const body = h("tbody");
  for (const row of rows) {
    const cells = columns.map((column) => drawCell(column, row));
    const line = h("tr", {}, cells);
    line.row = row;
    if (options.kind) searchable(line, options.kind, options.names(row));
    body.append(line);
  }
  const heads = columns.map((column, i) => headCell(column, i, body, columns));
  table.replaceChildren(h("thead", {}, h("tr", {}, heads)), body);
  if (options.foot) table.append(h("tfoot", {}, h("tr", {}, options.foot)));
}

function drawCell([title, cell, kind], row) {
  const content = h("span", {}, cell(row));
  return h("td", { class: `${kind || ""} ${content.hasChildNodes() ? "" : "empty"}`, "data-title": title }, content);
}

function headCell([title, , kind, key], index, body, columns) {
  if (!key) return h("th", { scope: "col", class: kind }, title);
  const cell = h("th", { scope: "col", class: kind, "aria-sort": "none" });
  cell.append(h("button", { onclick: () => sortBy(cell, body, columns[index][3]) }, title));
  return cell;
}

function sortBy(cell, body, key) {
  const down = cell.getAttribute("aria-sort") !== "descending";
  for (const other of cell.parentElement.children) if (other.hasAttribute("aria-sort")) other.ariaSort = "none";
  cell.setAttribute("aria-sort", down ? "descending" : "ascending");
  const lines = [...body.children].sort((a, b) => {
    const [x, y] = [key(a.row), key(b.row)];
    return (x < y ? -1 : x > y ? 1 : 0) * (down ? -1 : 1);
  });
  body.append(...lines);
}

function drawCollectives() {
  const most = Math.max(...REPORT.collectives.map((row) => row.sent), 1);
  const share = (row) => {
    const style = { "--width": `${(100 * row.sent) / most}%`, "--fill": `var(--${row.axis}, var(--wire))` };
    return h("span", { class: "share", style }, measure("share", SENT ? row.sent / SENT : 0));
  };
  fillTable(at("collective-table"), [
    ["collective", (row) => h("code", {}, row.kind), "", (row) => row.kind],
    ["axis", (row) => [axisName(row.axis), ` ${row.ranks}`], "", (row) => row.axis],
    ["phase", (row) => row.phase, "", (row) => row.phase],
    ["purpose", (row) => row.purpose, "", (row) => row.purpose],
    ["count", (row) => digits(row.count, 0), "number", (row) => row.count],
    ["data", (row) => measure("bytes", row.nbytes), "number", (row) => row.nbytes],
    ["sent", (row) => measure("bytes", row.sent), "number", (row) => row.sent],
    ["share of sent", share, "number", (row) => row.sent],
    ["time", (row) => measure("seconds", row.seconds), "number", (row) => row.seconds],
  ], REPORT.collectives, {
    kind: "collective",
    names: (row) => [row.kind, row.axis, row.phase, row.purpose],
    foot: REPORT.collectives.length ? collectiveFoot() : null,
  });
}

function collectiveFoot() {
  const total = (key) => sum(REPORT.collectives, (row) => row[key]);
  const cell = (title, value) => h("td", { class: "number", "data-title": title }, value);
  return [
    h("th", { scope: "row", colspan: 4 }, "All"),
    cell("count", digits(total("count"), 0)),
    cell("data", measure("bytes", total("nbytes"))),
    cell("sent", measure("bytes", total("sent"))),
    cell("share of sent", h("span", { class: "share all" }, measure("share", SENT ? 1 : 0))),
    cell("time", measure("seconds", total("seconds"))),
  ];
}

function drawBoundaries() {
  const way = (row) => h("span", { class: "way" }, chip(row.source), " → ", chip(row.destination));
  const collective = (name) => (name ? h("code", {}, name) : h("span", { class: "none" }, "none"));
  fillTable(at("boundary-table"), [
    ["module", (row) => h("code", {}, dotted(row.module)), "", (row) => row.module],
    ["axis", (row) => axisName(row.axis), "", (row) => row.axis],
    ["layout", way],
    ["forward", (row) => collective(row.forward), "", (row) => row.forward],
    ["backward", (row) => collective(row.backward), "", (row) => row.backward],
    ["tensor", (row) => measure("bytes", row.nbytes), "number", (row) => row.nbytes],
    ["count", (row) => digits(row.count, 0), "number", (row) => row.count],
    ["a step", (row) => measure("bytes", row.nbytes * row.count), "number", (row) => row.nbytes * row.count],
  ], REPORT.boundaries, { kind: "boundary", names: (row) => [row.module, row.axis, row.forward, row.backward] });
}

function drawPasses() {
  const nodes = (counts, sign) =>
    Object.entries(counts).map(([name, n]) => h("span", { class: "nodes" }, `${sign}${n} `, h("code", {}, name)));
  fillTable(at("pass-table"), [
    ["pass", (row) => h("code", {}, row.name)],
    ["what it does", (row) => row.summary, "long what"],
    ["nodes", (row) => digits(row.nodes, 0), "number"],
    ["came", (row) => nodes(row.added, "+"), "long"],
    ["went", (row) => nodes(row.removed, "−"), "long"],
  ], REPORT.passes, { kind: "pass", names: (row) => [row.name, ...Object.keys({ ...row.added, ...row.removed })] });
}

// -------------------------------------------------- section: the assumptions

function drawAssumptions() {
  at("assumed").replaceChildren(...assumptions());
  at("footer").textContent =
    "All sizes and times are those of one rank and one training step: forward, backward and optimizer. " +
    `KiB, MiB and GiB count in 1024. Schema ${REPORT.schema}. This file holds its data and loads nothing.`;
}

function assumptions() {
  const rates = Object.entries(REPORT.rates).map(([name, value]) =>
    h("div", {}, h("dt", {}, name.replaceAll("_", " ")), h("dd", {}, rate(name, value))),
  );
  const items = (lines) => h("ul", {}, lines.map((line) => h("li", {}, line)));
  const list = (title, lines) => (lines.length ? [h("h3", {}, title), items(lines)] : []);
  return [
    ...(rates.length ? [h("h3", {}, "Rates"), h("dl", { class: "rates" }, rates)] : []),
    ...list("Experts", REPORT.experts),
    ...list("Notes", REPORT.notes),
  ];
}

/** A rate: operations or bytes a second, a latency, a fraction. */
function rate(name, value) {
  if (typeof value !== "number") return String(value);
  if (/latency/.test(name)) return text("seconds", value);
  if (Math.abs(value) < 1e6) return text("plain", value);
  const [scale, unit] = SI.find(([size]) => Math.abs(value) >= size);
  const what = /flop/.test(name) ? "FLOP/s" : "B/s";
  return `${Number((value / scale).toPrecision(4))} ${unit}${what}`;
}

// ------------------------------------------------------------------ search

const FOUND = { parameter: [], boundary: [], collective: [], pass: [] };

function searchable(node, kind, names) {
  FOUND[kind].push({ node, names: names.join("\n").toLowerCase() });
}

/** Every word must occur in one of the names. */
function search(query) {
  const words = query.toLowerCase().split(/\s+/).filter(Boolean);
  const counts = {};
  for (const [kind, entries] of Object.entries(FOUND)) {
    counts[kind] = 0;
    for (const { node, names } of entries) {
      node.hidden = !words.every((word) => names.includes(word));
      counts[kind] += node.hidden ? 0 : 1;
    }
  }
  hideEmpty(words.length > 0);
  at("count").textContent = countText(counts, words.length > 0);
  document.body.classList.toggle("searching", words.length > 0);
}

/** Modules without a hit go away, those with one open; a table without rows says so. */
function hideEmpty(searching) {
  for (const node of [...at("tree").querySelectorAll("details")].reverse()) {
    node.hidden = !node.querySelector(".leaf:not([hidden])");
    if (searching && !node.hidden) node.open = true;
  }
  for (const note of document.querySelectorAll(".nothing")) {
    const section = note.closest("section");
    const lines = [...section.querySelectorAll(".leaf, tbody tr")].filter((line) => !line.closest("aside"));
    note.hidden = !searching || lines.some((line) => !line.hidden);
  }
}

function countText(counts, searching) {
  const names = { parameter: "parameters", boundary: "boundaries", collective: "collectives", pass: "passes" };
  return Object.keys(names).filter((kind) => FOUND[kind].length).map((kind) => {
    const all = FOUND[kind].length;
    return searching ? `${counts[kind]} of ${all} ${names[kind]}` : `${all} ${all === 1 ? kind : names[kind]}`;
  }).join(" · ");
}

function connectSearch() {
  const input = at("search");
  input.addEventListener("input", () => search(input.value));
  input.addEventListener("keydown", (event) => {
    if (event.key !== "Escape") return;
    input.value = "";
    search("");
  });
  document.addEventListener("keydown", (event) => {
    if (event.key !== "/" || event.target.closest("input")) return;
    event.preventDefault();
    input.focus();
  });
  search("");
}

function drawNav() {
  for (const id of ["collectives", "boundaries", "passes"]) at(id).hidden = !REPORT[id].length;
  at("assumptions").hidden = !at("assumed").hasChildNodes();
  const sections = [...document.querySelectorAll("main section")].filter((section) => !section.hidden);
  at("nav").replaceChildren(...sections.map((s) => h("a", { href: `#${s.id}` }, s.dataset.title)));
}

drawTop();
drawMeshSection();
drawMemory();
drawTree();
drawRankView();
drawCollectives();
drawTime();
drawBoundaries();
drawPasses();
drawAssumptions();
connectSearch();
drawNav();
