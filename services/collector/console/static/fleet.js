/* The fleet: workers as cards in a column for each role with lines between them, or as a table when they are many. */

import { byId, el, keyed, setAttribute, setText } from "./dom.js";
import { counted, duration, percent, rate } from "./format.js";
import { drawLines, point } from "./lines.js";
import { openPanel } from "./panel.js";
import { SILENT_S, flowSentence, flowsOf, workerSentence } from "./words.js";

const MAP_WORKERS_MAX = 40;
const ROOMY_MAX = 6;
/* Cards of a column with more workers leave out what is not needed at a look. */
const ROUTER = "router";
const COLUMNS = [
  [ROUTER, "Routers"],
  ["prefill", "Prefill"],
  ["both", "Both"],
  ["decode", "Decode"],
  ["store", "Store"],
];
const TABLE = [
  ["Worker", ({ id }) => id],
  ["Role", ({ role }) => role],
  ["Phase", ({ phase }) => phase],
  ["Running", ({ running }) => counted(running)],
  ["Waiting", ({ waiting }) => counted(waiting)],
  ["KV", ({ kv_used }) => percent(kv_used)],
  ["Hits", ({ hit_ratio }) => percent(hit_ratio)],
  ["Prompt tok/s", (one) => rate(one.prompt_tokens_per_s)],
  ["Tok/s", (one) => rate(one.generation_tokens_per_s)],
  ["Heard", (one) => (one.heard_s_ago ? `${duration(one.heard_s_ago)} ago` : "now")],
];

const HINT = "Point at a worker or a line for its numbers; open a worker for its flows and orders.";
const CAPTION_FLOWS_MAX = 4;

const view = { chosen: null, pointed: null };
/* `chosen`: "map" or "table" once a person has said so; `pointed`: the card or line that the caption tells of. */

/** Once. */
export function watchFleet(store) {
  for (const [id, as] of [["as-map", "map"], ["as-table", "table"]]) {
    byId(id).addEventListener("click", () => {
      view.chosen = as;
      drawFleet(store);
    });
  }
  const legend = [["requests", "requests/s"], ["kv", "KV bytes/s"]];
  byId("flow-legend").append(...legend.map(([kind, label]) => el("li", { class: `key flow-${kind}` }, label)));
  const map = byId("map");
  new ResizeObserver(() => drawLines(store.flows)).observe(map);
  for (const [begin, end] of [["pointerover", "pointerout"], ["focusin", "focusout"]]) {
    map.addEventListener(begin, (event) => pointAt(store, event.target.closest("[data-id], [data-words]")));
    map.addEventListener(end, () => pointAt(store, null));
  }
}

/** As map or table, whichever fits. */
export function drawFleet(store) {
  const workers = store.sortedWorkers();
  const as = view.chosen ?? (workers.length > MAP_WORKERS_MAX ? "table" : "map");
  byId("map").hidden = as !== "map";
  byId("worker-table").hidden = as !== "table";
  byId("flow-legend").hidden = as !== "map";
  byId("caption").hidden = as !== "map";
  setAttribute(byId("as-map"), "aria-pressed", String(as === "map"));
  setAttribute(byId("as-table"), "aria-pressed", String(as === "table"));
  if (as === "map") drawMap(store, workers);
  else drawTable(workers);
}

function drawMap(store, workers) {
  const columns = COLUMNS.map(([role, label]) => ({ role, label, workers: workers.filter((one) => one.role === role) }));
  columns[0].workers = [{ id: ROUTER, role: ROUTER, phase: "ready" }];
  const shown = columns.filter((column) => column.workers.length);
  keyed(byId("columns"), shown, ({ role }) => role, makeColumn, (node, column) => {
    node.dataset.many = column.workers.length > ROOMY_MAX;
    const update = column.role === ROUTER ? (card) => drawRouter(card, store) : drawCard;
    keyed(node.lastElementChild, column.workers, ({ id }) => id, makeCard, update);
  });
  drawLines(store.flows);
  drawCaption(store);
}

function makeColumn({ role, label }) {
  return el("section", { class: "column", "data-role": role, "aria-label": label }, el("h3", {}, label), el("div", { class: "cards" }));
}

function makeCard({ id, role }) {
  const open = (event) => openPanel("worker", id, event.currentTarget);
  const meter = role === ROUTER ? null : el("span", { class: "meter", "aria-hidden": "true" }, el("i"));
  const inside = [el("span", { class: "name" }, el("b", {}, id), el("span", { class: "phase" })), meter, el("span", { class: "load" })];
  if (role === ROUTER) return el("div", { class: "worker", role: "group", tabindex: 0, "data-id": id, "data-role": role }, inside);
  return el("button", { type: "button", class: "worker", "data-id": id, onclick: open }, inside);
}

function drawCard(card, worker) {
  const [name, meter, load] = card.children;
  Object.assign(card.dataset, { phase: worker.phase, role: worker.role });
  card.classList.toggle("silent", worker.heard_s_ago > SILENT_S);
  setText(name.lastElementChild, worker.phase);
  meter.firstElementChild.style.width = `${Math.min(Math.max(worker.kv_used, 0), 1) * 100}%`;
  const words = [`KV ${percent(worker.kv_used)}`];
  if (worker.role !== "store") words.push(`${counted(worker.running)} run`, `${counted(worker.waiting)} wait`);
  if (worker.hit_ratio !== null) words.push(`${percent(worker.hit_ratio)} hits`);
  keyed(load, words.map((word, at) => ({ word, at })), ({ at }) => at, () => el("span"), (node, { word }) => setText(node, word));
  setAttribute(card, "aria-label", workerSentence(worker));
}

function drawRouter(card, store) {
  const asked = store.tenants.reduce((sum, tenant) => sum + tenant.requests_per_s, 0);
  setText(card.lastElementChild, `${rate(asked)} requests/s`);
  setAttribute(card, "aria-label", `Routers: ${rate(asked)} requests a second`);
}

function drawTable(workers) {
  const place = byId("worker-table");
  if (!place.firstElementChild) {
    const heads = TABLE.map(([name]) => el("th", { scope: "col" }, name));
    place.append(el("table", {}, el("thead", {}, el("tr", {}, heads)), el("tbody")));
  }
  keyed(place.querySelector("tbody"), workers, ({ id }) => id, makeTableRow, (row, worker) => {
    row.dataset.phase = worker.phase;
    TABLE.forEach(([, read], index) => {
      if (index) setText(row.children[index], read(worker));
    });
  });
}

function makeTableRow({ id }) {
  const open = (event) => openPanel("worker", id, event.currentTarget);
  const name = el("th", { scope: "row" }, el("button", { type: "button", class: "link", onclick: open }, id));
  return el("tr", {}, name, TABLE.slice(1).map(() => el("td")));
}

/* What is pointed at is told in the caption, and the lines that do not belong to it step back. */
function pointAt(store, target) {
  view.pointed = target;
  const isCard = target?.dataset.id !== undefined;
  point(isCard ? target.dataset.id : null, isCard ? null : target);
  drawCaption(store);
}

function drawCaption(store) {
  const target = view.pointed?.isConnected ? view.pointed : null;
  let words = store.workers.size ? HINT : "No worker is there yet. Those that start appear here by themselves.";
  if (target?.dataset.id) words = wordsOf(store, target.dataset.id);
  else if (target) words = target.dataset.words;
  setText(byId("caption"), words);
}

function wordsOf(store, id) {
  const worker = store.workers.get(id);
  const flows = flowsOf(store.flows, id).slice(0, CAPTION_FLOWS_MAX).map(flowSentence);
  return [worker ? workerSentence(worker) : "All routers", ...flows].join(" · ");
}
