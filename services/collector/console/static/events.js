/* The event list and the tables of tenants, models, usage and batches. */

import { byId, el, keyed, marked, setAttribute, setText } from "./dom.js";
import { UNKNOWN, clock, compact, counted, dateAndTime, duration, longDuration, percent, rate } from "./format.js";

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

const USAGE_COLUMNS = [
  ["Key", (one) => (one.key ? `${one.tenant}/${one.key}` : "(no key)")],
  ["Model", (one) => one.model || "(none)"],
  ["Requests", (one) => counted(one.requests)],
  ["Failed", (one) => counted(one.failed)],
  ["Prompt tokens", (one) => compact(one.prompt_tokens)],
  ["Cached", (one) => percent(one.cached_ratio)],
  ["Output tokens", (one) => compact(one.completion_tokens)],
  ["Engine time", (one) => longDuration(one.engine_s)],
  ["Budget of the key", (one) => (one.budget_tokens ? `${percent(one.budget_used)} of ${compact(one.budget_tokens)}` : UNKNOWN)],
];

const BATCH_COLUMNS = [
  ["Batch", (one) => shortened(one.id)],
  ["Status", (one) => one.status.replace("_", " ")],
  ["Progress", (one) => (one.total ? percent((one.completed + one.failed) / one.total) : UNKNOWN)],
  ["Lines done", (one) => (one.total ? `${counted(one.completed + one.failed)} of ${counted(one.total)}` : UNKNOWN)],
  ["Failed", (one) => counted(one.failed)],
  ["Tenant", (one) => one.tenant || "(none)"],
  ["Created", (one) => dateAndTime(one.created_at)],
  ["Router", (one) => one.router || UNKNOWN],
  ["Fault", (one) => one.fault],
];
const FAILED_COLUMN = 4;
const BATCH_ID_CHARS = 12;

/* A larger share of a budget is highlighted. */
const BUDGET_NEAR = 0.8;

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

/** This month per key and model; hidden before anything is counted. */
export function drawUsage(store) {
  const { month, rows, more } = store.usage;
  byId("usage").hidden = rows.length === 0;
  setText(byId("usage-title"), `Usage in ${month}`);
  drawTable(byId("usage-table"), USAGE_COLUMNS, rows, (one) => JSON.stringify([one.tenant, one.key, one.model]), "");
  const drawn = rows.length ? byId("usage-table").querySelectorAll("tbody tr") : [];
  rows.forEach((one, at) => setAttribute(drawn[at].lastElementChild, "data-level", budgetLevel(one.budget_used ?? 0)));
  const others = more ? ` ${counted(more)} more rows, with fewer tokens, are left out.` : "";
  const note = `Months are those of UTC; engine time is an estimate.${others} \`baton usage\` shows all, by day and month.`;
  byId("usage-more").replaceChildren(...marked(note));
}

/** Batches, those that run first; hidden while there are none. */
export function drawBatches(store) {
  const { rows, more } = store.batches;
  byId("batches").hidden = rows.length === 0;
  drawTable(byId("batch-table"), BATCH_COLUMNS, rows, (one) => one.id, "");
  const drawn = rows.length ? byId("batch-table").querySelectorAll("tbody tr") : [];
  rows.forEach((one, at) => setAttribute(drawn[at].children[FAILED_COLUMN], "data-level", one.failed ? "warning" : null));
  const others = more ? ` ${counted(more)} older ones are left out.` : "";
  byId("batch-more").replaceChildren(...marked(`\`baton batch list\` shows whole ids.${others}`));
}

function shortened(id) {
  return id.length > BATCH_ID_CHARS ? `…${id.slice(-BATCH_ID_CHARS)}` : id; // Ids begin with their time: ends differ.
}

function budgetLevel(used) {
  if (used >= 1) return "error";
  return used >= BUDGET_NEAR ? "warning" : null;
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
    (row, one) => columns.forEach(([, read], index) => {
      setText(row.children[index], read(one));
      setAttribute(row.children[index], "title", row.children[index].textContent); // It may be cut off.
    }),
  );
}

function emptyTable(columns) {
  const heads = columns.map(([name]) => el("th", { scope: "col" }, name));
  return el("table", {}, el("thead", {}, el("tr", {}, heads)), el("tbody"));
}
