/* The event list and the tables of tenants and models. */

import { byId, el, keyed, setText } from "./dom.js";
import { clock, duration, percent, rate } from "./format.js";

const TENANT_COLUMNS = [
  ["Tenant", (one) => one.tenant || "(none)"],
  ["Requests/s", (one) => rate(one.requests_per_s)],
  ["Tokens/s", (one) => rate(one.tokens_per_s)],
  ["Refused/s", (one) => rate(one.refused_per_s)],
  ["Cached", (one) => percent(one.cached_ratio)],
];

const MODEL_COLUMNS = [
  ["Model", (one) => one.model],
  ["Ready", (one) => Object.entries(one.ready).map(([role, count]) => `${count} ${role}`).join(", ") || "none"],
  ["Requests/s", (one) => rate(one.requests_per_s)],
  ["TTFT", (one) => duration(one.ttft_s)],
  ["Tokens/s in, out", (one) => `${rate(one.tokens_in_per_s)}, ${rate(one.tokens_out_per_s)}`],
  ["Failed/s", (one) => rate(one.failed_per_s)],
];

const eventKeys = new WeakMap();
let eventsSeen = 0;

/** Events, the newest first. */
export function drawEvents(store) {
  byId("events-empty").hidden = store.events.length > 0;
  byId("event-rows").hidden = store.events.length === 0;
  keyed(byId("event-rows"), store.events, keyOf, (one) =>
    el(
      "li",
      { class: one.level },
      el("time", { datetime: new Date(one.at * 1000).toISOString() }, clock(one.at)),
      el("span", { class: "kind" }, one.kind),
      el("span", { class: "text" }, one.subject && !one.text.includes(one.subject) ? el("b", {}, one.subject, " ") : null, one.text),
    ),
  );
}

/* Two events can have the same text, so each object gets its own number. */
function keyOf(event) {
  if (!eventKeys.has(event)) eventKeys.set(event, (eventsSeen += 1));
  return eventKeys.get(event);
}

/** One row for each tenant. */
export function drawTenants(store) {
  drawTable(byId("tenant-table"), TENANT_COLUMNS, store.tenants, (one) => one.tenant, "No requests in the last minutes.");
}

/** One row for each model; hidden while there is only one. */
export function drawModels(store) {
  byId("models").hidden = store.models.length < 2;
  drawTable(byId("model-table"), MODEL_COLUMNS, store.models, (one) => one.model, "No models yet.");
}

function drawTable(place, columns, rows, keyOfRow, whenEmpty) {
  if (!rows.length) {
    place.replaceChildren(el("p", { class: "empty" }, whenEmpty));
    return;
  }
  if (!place.querySelector("table")) place.replaceChildren(emptyTable(columns));
  keyed(
    place.querySelector("tbody"),
    rows,
    keyOfRow,
    () => el("tr", {}, columns.map((_column, index) => el(index ? "td" : "th", index ? {} : { scope: "row" }))),
    (row, one) => columns.forEach(([, read], index) => setText(row.children[index], read(one))),
  );
}

function emptyTable(columns) {
  const heads = columns.map(([name]) => el("th", { scope: "col" }, name));
  return el("table", {}, el("thead", {}, el("tr", {}, heads)), el("tbody"));
}
