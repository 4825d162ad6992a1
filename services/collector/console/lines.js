/* Lines between cards: as wide as what flows is much, with an arrow where it goes. */

import { byId, keyed, setAttribute, svg } from "./dom.js";
import { flowSentence } from "./words.js";

const THIN_PX = 1.5;
const WIDE_PX = 8;
const APART_PX = 6;
/* There and back are two lines. */
const BEND_PX = 26;
const STACKED = matchMedia("(max-width: 640px)");
/* Then columns lie one below the other, as in fleet.css. */
const MEASURES = { requests: (flow) => flow.per_s, kv: (flow) => flow.bytes_per_s };

/** Draws all lines where the cards are now. */
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
  const items = [...idleLinks(cards, known), ...known].map((flow) => ({
    flow,
    d: pathBetween(cards.get(flow.from), cards.get(flow.to), origin, flow.kind === "kv" ? APART_PX : 0),
    share: widest[flow.kind] > 0 ? Math.sqrt(measure(flow) / widest[flow.kind]) : 0,
  }));
  keyed(drawing.lastElementChild, items, ({ flow }) => `${flow.kind} ${flow.from} ${flow.to}`, makeLine, drawLine);
}

/** Lines that belong neither to this worker nor to this line step back; null and null: none does. */
export function point(id, line) {
  for (const group of byId("lines").querySelectorAll("[data-words]")) {
    const isOne = line ? group === line : group.dataset.from === id || group.dataset.to === id;
    group.classList.toggle("aside", (id !== null || line !== null) && !isOne);
  }
}

/* Where nothing goes just now, a hairline says that it could. */
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
  /* A thin line is hard to point at; a wide one that nobody sees lies over it. */
  return svg("g", { "data-words": "", "data-from": flow.from, "data-to": flow.to }, line, svg("path", { class: "reach" }));
}

function drawLine(group, { flow, d, share }) {
  for (const path of group.children) setAttribute(path, "d", d);
  if (flow.kind === "idle") return;
  group.dataset.words = flowSentence(flow);
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

/* From edge to edge: along the reading direction where the columns differ, around the side where they do not. */
function pathBetween(from, to, origin, apart) {
  const [a, b] = [from, to].map((card) => boxOf(card.getBoundingClientRect(), origin));
  const { begin, end, bends } = ends(a, b);
  const shift = begin[0] <= end[0] ? -apart : apart;
  const points = [begin, [begin[0] + bends[0], begin[1]], [end[0] + bends[1], end[1]], end];
  const [p, q, r, s] = points.map(([x, y]) => (STACKED.matches ? `${y + shift} ${x}` : `${x} ${y + shift}`));
  return `M${p}C${q} ${r} ${s}`;
}

function ends(a, b) {
  const there = b.near - a.far;
  if (there > 0) return { begin: [a.far, a.middle], end: [b.near, b.middle], bends: [there / 2, -there / 2] };
  const back = a.near - b.far;
  if (back > 0) return { begin: [a.near, a.middle], end: [b.far, b.middle], bends: [-back / 2, back / 2] };
  return { begin: [a.far, a.middle], end: [b.far, b.middle], bends: [BEND_PX, BEND_PX] };
}

/* Near and far: along the direction in which the columns follow each other; middle: across it. */
function boxOf(box, origin) {
  const [left, top] = [box.left - origin.left, box.top - origin.top];
  if (STACKED.matches) return { near: top, far: top + box.height, middle: left + box.width / 2 };
  return { near: left, far: left + box.width, middle: top + box.height / 2 };
}
