"use strict";

const REPORT = JSON.parse(document.getElementById("data").textContent);

// ---------------------------------------------------------------- elements

function put(node, children) {
  for (const child of children.flat(Infinity)) {
    if (child !== null && child !== undefined && child !== false) node.append(child);
  }
  return node;
}

/** An element. Keys of `props` that start with "on" are listeners, others attributes; false and null leave one out. */
function h(tag, props = {}, ...children) {
  return put(setAll(document.createElement(tag), props), children);
}

function svg(tag, props = {}, ...children) {
  return put(setAll(document.createElementNS("http://www.w3.org/2000/svg", tag), props), children);
}

function setAll(node, props) {
  for (const [key, value] of Object.entries(props)) {
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (key === "style") for (const [name, v] of Object.entries(value)) node.style.setProperty(name, v);
    else if (value === true) node.setAttribute(key, "");
    else if (value !== false && value !== null && value !== undefined) node.setAttribute(key, value);
  }
  return node;
}

function at(id) {
  return document.getElementById(id);
}

// ------------------------------------------------------------------- units

const SIZES = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
const TIMES = [[1, "s"], [1e-3, "ms"], [1e-6, "µs"]];
const COUNTS = [[1e15, "quadrillion"], [1e12, "trillion"], [1e9, "billion"], [1e6, "million"]];
const SI = [[1e15, "P"], [1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"], [1, ""]];

function digits(value, places) {
  return value.toLocaleString("en-US", { minimumFractionDigits: places, maximumFractionDigits: places });
}

/** [number, unit] of each kind of value. */
const units = {
  bytes(n) {
    let power = 0;
    while (Math.abs(n) >= 1023.95 && power < SIZES.length - 1) [n, power] = [n / 1024, power + 1];
    return [digits(n, power ? 1 : 0), SIZES[power]];
  },
  seconds(n) {
    if (n === 0) return ["0", "s"];
    const [scale, unit] = TIMES.find(([size]) => Math.abs(n) >= 0.99995 * size) || TIMES[2];
    return [digits(n / scale, unit === "s" ? 2 : 1), unit];
  },
  flops(n) {
    const [scale, unit] = SI.find(([size]) => Math.abs(n) >= size) || SI.at(-1);
    return [digits(n / scale, scale > 1 ? 1 : 0), `${unit}FLOP`];
  },
  share: (n) => [digits(100 * n, 1), "%"],
  plain: (n) => [Number.isInteger(n) ? digits(n, 0) : String(Number(n.toPrecision(4))), ""],
};

function text(kind, value) {
  return units[kind](value).join(kind === "share" ? "" : " ").trim();
}

/** Number and unit in columns of their own, so that the digits of a table stand below each other. */
function measure(kind, value) {
  const [number, unit] = units[kind](value);
  return h("span", { class: "measure" }, h("b", {}, number), h("i", {}, unit));
}

function amount(n) {
  const found = COUNTS.find(([size]) => n >= size);
  return found ? `${(n / found[0]).toPrecision(n / found[0] < 999.5 ? 3 : 4)} ${found[1]}` : digits(n, 0);
}

function plural(n, one, many = `${one}s`) {
  return `${digits(n, 0)} ${n === 1 ? one : many}`;
}

function sum(items, of = (x) => x) {
  return items.reduce((total, item) => total + of(item), 0);
}

function product(numbers) {
  return numbers.reduce((a, b) => a * b, 1);
}

function shapeText(shape) {
  return shape.length ? shape.map(String).join(" × ") : "scalar";
}

const ITEM = { float64: 8, int64: 8, float32: 4, int32: 4, float16: 2, bfloat16: 2, int16: 2 };

function itemSize(dtype) {
  return ITEM[dtype.replace("torch.", "")] || 1;
}

function localBytes(row) {
  return product(row.local_shape) * itemSize(row.dtype);
}

function figure(list, name) {
  return list.find((item) => item.name === name);
}

// -------------------------------------------------------------------- mesh

const STORAGE = Object.keys(REPORT.storage);
const SIZE = {
  dp_replicate: REPORT.mesh.dp_replicate || 1,
  tp: REPORT.mesh.tp || 1,
  ep_rest: REPORT.storage.ep_rest || 1,
};
SIZE.fsdp = REPORT.mesh.fsdp || 1;
SIZE.efsdp = SIZE.fsdp / SIZE.ep_rest;
SIZE.ep = REPORT.mesh.ep || 1;
const RANKS = SIZE.dp_replicate * SIZE.fsdp * SIZE.tp;

const AXES = {
  dp_replicate: "Copies of everything below. Each copy has its own batches, and their gradients are averaged.",
  fsdp: "Ranks with batches of their own. They store parameters in slices and gather each one just before its use.",
  tp: "Ranks that share one batch and split the matrix products. They exchange activations inside every layer.",
  ep: "Ranks that divide the experts. Every token travels to the ranks of its experts and back.",
  ep_rest: "The part of fsdp over which experts are divided.",
  efsdp: "The rest of fsdp: ranks that hold the same experts and store slices of them.",
};
const FUSED = { ep: ["tp", "ep_rest"], fsdp: ["ep_rest", "efsdp"] };

/** Axes over which at least one parameter is cut; over the others all parameters are whole. */
const CUT = STORAGE.filter((axis) => REPORT.parameters.some((row) => (row.placements[axis] || "R") !== "R"));

/** Where a rank stands on every axis. Neighbours share a tp group, then come ep_rest, efsdp and dp_replicate. */
function placeOf(rank) {
  const tp = rank % SIZE.tp;
  const fsdp = Math.floor(rank / SIZE.tp) % SIZE.fsdp;
  const ep_rest = fsdp % SIZE.ep_rest;
  const efsdp = Math.floor(fsdp / SIZE.ep_rest);
  const dp_replicate = Math.floor(rank / (SIZE.tp * SIZE.fsdp));
  return { dp_replicate, fsdp, tp, ep_rest, efsdp, ep: tp * SIZE.ep_rest + ep_rest };
}

function rankAt(dp_replicate, fsdp, tp) {
  return (dp_replicate * SIZE.fsdp + fsdp) * SIZE.tp + tp;
}

/** Which group of `axis` a rank is in: its place on all axes that are no part of it. */
function groupKey(rank, axis) {
  const place = placeOf(rank);
  const parts = FUSED[axis] && SIZE.ep > 1 ? FUSED[axis] : [axis];
  const basis = SIZE.ep > 1 ? ["dp_replicate", "tp", "ep_rest", "efsdp"] : ["dp_replicate", "tp", "fsdp"];
  return basis.filter((name) => !parts.includes(name)).map((name) => place[name]).join(",");
}

function groupOf(rank, axis) {
  const key = groupKey(rank, axis);
  return allRanks().filter((other) => groupKey(other, axis) === key);
}

function allRanks() {
  return Array.from({ length: RANKS }, (_, rank) => rank);
}

/** Axes to speak of: those of the user, then those of the storage, without sizes of 1. */
function shownAxes() {
  return ["dp_replicate", "fsdp", "tp", "ep", "ep_rest", "efsdp"].filter(
    (name) => SIZE[name] > 1 && (SIZE.ep > 1 || !["ep", "ep_rest", "efsdp"].includes(name)),
  );
}

/** All of 0..n-1, or the first ones, null for a gap, and the last. */
function sample(n, most) {
  if (n <= most) return Array.from({ length: n }, (_, i) => i);
  return [...Array.from({ length: most - 2 }, (_, i) => i), null, n - 1];
}

/** Runs of numbers, "0–3, 8". */
function spellRanks(ranks, most = 12) {
  const runs = [];
  for (const rank of ranks) {
    if (runs.length && runs.at(-1)[1] === rank - 1) runs.at(-1)[1] = rank;
    else runs.push([rank, rank]);
  }
  const parts = runs.map(([a, b]) => (b - a > 1 ? `${a}–${b}` : b > a ? `${a}, ${b}` : `${a}`));
  return parts.length > most ? `${parts.slice(0, most - 1).join(", ")}, … ${parts.at(-1)}` : parts.join(", ");
}

// ------------------------------------------------------------------ slices
// The same rule as the library's: placements apply from left to right in the order of the storage axes, each to what
// the ones before it left over; shards are those of torch.chunk, the last ones may be short or empty.

/** "S(1) x 2" -> {dim: 1, parts: 2}; null for R. */
function parsePlacement(placement) {
  const found = /^S\((\d+)\)(?: x (\d+))?$/.exec(placement || "R");
  return found && { dim: Number(found[1]), parts: Number(found[2] || 1) };
}

/** For every dim of `row` the ranges [start, stop) of global indices that `rank` holds. */
function slicesOf(row, rank) {
  const place = placeOf(rank);
  const held = row.shape.map((size) => (size ? [[0, size]] : []));
  for (const axis of STORAGE) {
    const shard = parsePlacement(row.placements[axis]);
    if (shard) held[shard.dim] = takeShard(held[shard.dim], shard.parts, REPORT.storage[axis], place[axis]);
  }
  return held;
}

/** Shard `index` of `size` of each of `parts` equal parts of the positions in `held`. */
function takeShard(held, parts, size, index) {
  const part = sum(held, ([start, stop]) => stop - start) / parts;
  const chunk = Math.ceil(part / size);
  const [start, stop] = [Math.min(index * chunk, part), Math.min((index + 1) * chunk, part)];
  const pieces = [];
  for (let p = 0; p < parts; p++) pieces.push(...takeRange(held, p * part + start, p * part + stop));
  return merge(pieces);
}

/** Global ranges of the local positions [start, stop). */
function takeRange(held, start, stop) {
  const taken = [];
  let position = 0;
  for (const [first, last] of held) {
    const low = Math.max(start, position);
    const high = Math.min(stop, position + last - first);
    if (low < high) taken.push([first + low - position, first + high - position]);
    position += last - first;
  }
  return taken;
}

function merge(pieces) {
  const merged = [];
  for (const [start, stop] of pieces) {
    if (merged.length && merged.at(-1)[1] === start) merged.at(-1)[1] = stop;
    else merged.push([start, stop]);
  }
  return merged;
}

function sliceText(row, held) {
  if (held.some((ranges) => !ranges.length)) return "nothing";
  const dims = held.map((ranges, dim) =>
    ranges.length === 1 && ranges[0][0] === 0 && ranges[0][1] === row.shape[dim]
      ? ":"
      : ranges.map(([a, b]) => `${a}:${b}`).join(" + "),
  );
  return `[${dims.join(", ")}]`;
}

/** The different slices of `row` in the order of the tensor, with the ranks that hold each. */
function distinctSlices(row) {
  const found = new Map();
  for (const rank of allRanks()) {
    const held = slicesOf(row, rank);
    const key = JSON.stringify(held);
    if (!found.has(key)) found.set(key, { held, ranks: [] });
    found.get(key).ranks.push(rank);
  }
  const start = (slice, dim) => (slice.held[dim].length ? slice.held[dim][0][0] : Infinity);
  return [...found.values()].sort((a, b) => {
    for (let dim = 0; dim < row.shape.length; dim++) {
      if (start(a, dim) !== start(b, dim)) return start(a, dim) < start(b, dim) ? -1 : 1;
    }
    return a.ranks[0] - b.ranks[0];
  });
}
