/* The fleet: a map of worker cards, one column for each role, with lines between them; or a table for many workers. */

import { byId, el, keyed, setAttribute, setText } from "./dom.js";
import { counted, duration, percent, rate } from "./format.js";
import { drawLines, point } from "./flow_lines.js";
import { openPanel } from "./panel.js";
import { SILENT_S, flowSentence, flowsOf, workerSentence } from "./sentences.js";

const MAP_WORKERS_MAX = 40;
const ROOMY_MAX = 6;
/* Cards of a column with more workers show less detail. */
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
  ["Model", ({ model }) => model],
  ["Role", ({ role }) => role],
  ["Phase", ({ phase }) => phase],
  ["Running", ({ running }) => counted(running)],
  ["Waiting", ({ waiting }) => counted(waiting)],
  ["KV", ({ kv_used }) => percent(kv_used)],
  ["Hits", ({ hit_ratio }) => percent(hit_ratio)],
  ["Prompt tok/s", (one) => rate(one.prompt_tokens_per_s)],
  ["Tok/s", (one) => rate(one.generation_tokens_per_s)],
  ["Last report", (one) => (one.heard_s_ago ? `${duration(one.heard_s_ago)} ago` : "now")],
];

const HINT = "Point at a worker or a line to see its numbers. Click a worker to see its flows, drain it or change its role.";
const CAPTION_FLOWS_MAX = 4;

const view = { chosen: null, pointed: null };
/* `chosen`: "map" or "table" once the user has chosen; `pointed`: the card or line that the caption describes. */

/** Attach the listeners; call once. */
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
    map.addEventListener(begin, (event) => pointAt(store, event.target.closest("[data-id], [data-text]")));
    map.addEventListener(end, () => pointAt(store, null));
  }
}

/** Draw as map or table. */
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
  const items = [`KV ${percent(worker.kv_used)}`];
  if (worker.role !== "store") items.push(`${counted(worker.running)} running`, `${counted(worker.waiting)} waiting`);
  if (worker.hit_ratio !== null) items.push(`${percent(worker.hit_ratio)} hits`);
  keyed(load, items.map((text, at) => ({ text, at })), ({ at }) => at, () => el("span"), (node, { text }) => setText(node, text));
  setAttribute(card, "aria-label", workerSentence(worker));
}

function drawRouter(card, store) {
  const perS = store.tenants.reduce((sum, tenant) => sum + tenant.requests_per_s, 0);
  setText(card.lastElementChild, `${rate(perS)} requests/s`);
  setAttribute(card, "aria-label", `Routers: ${rate(perS)} requests per second`);
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

/* The caption describes the pointed card or line; unrelated lines fade. */
function pointAt(store, target) {
  view.pointed = target;
  const isCard = target?.dataset.id !== undefined;
  point(isCard ? target.dataset.id : null, isCard ? null : target);
  drawCaption(store);
}

function drawCaption(store) {
  const target = view.pointed?.isConnected ? view.pointed : null;
  let text = store.workers.size ? HINT : "No workers yet. Workers appear here when they start.";
  if (target?.dataset.id) text = captionOf(store, target.dataset.id);
  else if (target) text = target.dataset.text;
  setText(byId("caption"), text);
}

function captionOf(store, id) {
  const worker = store.workers.get(id);
  const flows = flowsOf(store.flows, id).slice(0, CAPTION_FLOWS_MAX).map(flowSentence);
  return [worker ? workerSentence(worker) : "All routers", ...flows].join(" · ");
}
