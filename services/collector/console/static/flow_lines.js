/* Lines between cards: the width shows the amount, the arrow the direction. */

import { byId, keyed, setAttribute, svg } from "./dom.js";
import { flowSentence } from "./sentences.js";

const THIN_PX = 1.5;
const WIDE_PX = 8;
const APART_PX = 6;
/* Distance between the lines of the two directions. */
const BEND_PX = 14;
/* With this, the widest line within the last column stays inside of the card. */
const CLEAR_PX = 11;
const STACKED = matchMedia("(max-width: 640px)");
/* On narrow screens the columns are stacked, as in fleet.css. */
const MEASURES = { requests: (flow) => flow.per_s, kv: (flow) => flow.bytes_per_s };

/** Draw all lines at the cards' present positions. */
export function drawLines(flows) {
  const map = byId("map");
  if (map.hidden) return;
  const drawing = byId("lines");
  const origin = map.getBoundingClientRect();
  setAttribute(drawing, "viewBox", `0 0 ${origin.width} ${origin.height}`);
  if (!drawing.firstElementChild) drawing.append(arrows(), svg("g"));
  const cards = new Map([...map.querySelectorAll("[data-id]")].map((card) => [card.dataset.id, card]));
  const known = flows.filter((flow) => cards.has(flow.from) && cards.has(flow.to));
  const widest = { requests: 0, kv: 0 };
  for (const flow of known) widest[flow.kind] = Math.max(widest[flow.kind], measure(flow));
  const boxes = new Map([...cards].map(([id, card]) => [id, boxOf(card, origin)]));
  const columns = [...map.querySelectorAll(".column")].map((column) =>
    boxAround([...column.querySelectorAll("[data-id]")].map((card) => boxes.get(card.dataset.id))),
  );
  const items = [...idleLinks(cards, known), ...known].map((flow) => ({
    flow,
    d: pathBetween(boxes.get(flow.from), boxes.get(flow.to), columns, flow.kind === "kv" ? APART_PX : 0),
    share: widest[flow.kind] > 0 ? Math.sqrt(measure(flow) / widest[flow.kind]) : 0,
  }));
  keyed(drawing.lastElementChild, items, ({ flow }) => `${flow.kind} ${flow.from} ${flow.to}`, makeLine, drawLine);
}

/** Fade all lines that belong neither to this worker nor are this line; null and null: fade none. */
export function point(id, line) {
  for (const group of byId("lines").querySelectorAll("[data-text]")) {
    const isOne = line ? group === line : group.dataset.from === id || group.dataset.to === id;
    group.classList.toggle("aside", (id !== null || line !== null) && !isOne);
  }
}

/* A hairline to each ready worker without traffic. */
function idleLinks(cards, known) {
  const busy = new Set(known.filter((flow) => flow.kind === "requests").map((flow) => flow.to));
  const serving = [...cards.values()].filter((card) => card.dataset.phase === "ready" && !busy.has(card.dataset.id));
  const links = serving.filter((card) => !["router", "store"].includes(card.dataset.role));
  return links.map((card) => ({ from: "router", to: card.dataset.id, kind: "idle" }));
}

function measure(flow) {
  return MEASURES[flow.kind]?.(flow) ?? 0;
}

function makeLine({ flow }) {
  if (flow.kind === "idle") return svg("g", { class: "idle" }, svg("path"));
  const line = svg("path", { class: `flow flow-${flow.kind}`, "marker-end": `url(#arrow-${flow.kind})` });
  /* A thin line is hard to hit, so an invisible wide one lies over it. */
  return svg("g", { "data-text": "", "data-from": flow.from, "data-to": flow.to }, line, svg("path", { class: "reach" }));
}

function drawLine(group, { flow, d, share }) {
  for (const path of group.children) setAttribute(path, "d", d);
  if (flow.kind === "idle") return;
  group.dataset.text = flowSentence(flow);
  group.firstElementChild.style.strokeWidth = `${THIN_PX + (WIDE_PX - THIN_PX) * share}px`;
}

function arrows() {
  const form = { viewBox: "0 0 10 10", refX: 8, refY: 5, markerUnits: "userSpaceOnUse", orient: "auto" };
  const marker = (kind) =>
    svg(
      "marker",
      { id: `arrow-${kind}`, ...form, markerWidth: 12, markerHeight: 12 },
      svg("path", { d: "M0 0 10 5 0 10z", class: `arrow flow-${kind}` }),
    );
  return svg("defs", {}, marker("requests"), marker("kv"));
}

/* From edge to edge; lines that pass other columns go around them, so that they do not seem to start there. */
function pathBetween(a, b, columns, apart) {
  const [begin, end] = ends(a, b);
  const shift = begin[0] <= end[0] ? -apart : apart;
  const [first, last] = [Math.min(begin[0], end[0]), Math.max(begin[0], end[0])];
  const passed = columns.filter((column) => column.near >= first && column.far <= last);
  const points = passed.length ? [begin, ...detourAround(passed, begin, end), end] : [begin, end];
  const placed = points.map(([along, across]) => [along, across + shift]);
  const pieces = placed.slice(1).map((to, at) => curve(placed[at], to, a.far === b.far ? BEND_PX : 0));
  return `M${onPage(placed[0])}${pieces.join("")}`;
}

function ends(a, b) {
  if (b.near > a.far) return [[a.far, a.middle], [b.near, b.middle]];
  if (a.near > b.far) return [[a.near, a.middle], [b.far, b.middle]];
  return [[a.far, a.middle], [b.far, b.middle]];
}

/* The shorter way around: before the first card of these columns, or after the last. */
function detourAround(columns, begin, end) {
  const middle = (begin[1] + end[1]) / 2;
  const low = Math.min(...columns.map((column) => column.low)) - CLEAR_PX;
  const high = Math.max(...columns.map((column) => column.high)) + CLEAR_PX;
  const across = middle - low <= high - middle ? low : high;
  const [near, far] = [Math.min(...columns.map((one) => one.near)), Math.max(...columns.map((one) => one.far))];
  return begin[0] <= end[0] ? [[near, across], [far, across]] : [[far, across], [near, across]];
}

/* Curves start and end along the axis of the columns; a line within one column bends out of it. */
function curve([x, y], [toX, toY], loop) {
  const bend = loop || (toX - x) / 2;
  return `C${onPage([x + bend, y])} ${onPage([loop ? toX + bend : toX - bend, toY])} ${onPage([toX, toY])}`;
}

function onPage([along, across]) {
  return STACKED.matches ? `${across} ${along}` : `${along} ${across}`;
}

/* near and far: along the axis of the columns; low and high: across it. */
function boxOf(card, origin) {
  const box = card.getBoundingClientRect();
  const [left, top] = [box.left - origin.left, box.top - origin.top];
  const [right, bottom] = [left + box.width, top + box.height];
  if (STACKED.matches) return { near: top, far: bottom, low: left, high: right, middle: left + box.width / 2 };
  return { near: left, far: right, low: top, high: bottom, middle: top + box.height / 2 };
}

function boxAround(boxes) {
  const [near, low] = ["near", "low"].map((side) => Math.min(...boxes.map((box) => box[side])));
  const [far, high] = ["far", "high"].map((side) => Math.max(...boxes.map((box) => box[side])));
  return { near, far, low, high };
}
