/* The event list and the tenant table. */

import { byId, el, keyed, setText } from "./dom.js";
import { clock, percent, rate } from "./format.js";

const TENANT_COLUMNS = [
  ["Tenant", (one) => one.tenant || "(none)"],
  ["Requests/s", (one) => rate(one.requests_per_s)],
  ["Tokens/s", (one) => rate(one.tokens_per_s)],
  ["Refused/s", (one) => rate(one.refused_per_s)],
  ["Cached", (one) => percent(one.cached_ratio)],
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
  const place = byId("tenant-table");
  if (!store.tenants.length) {
    place.replaceChildren(el("p", { class: "empty" }, "No requests in the last minutes."));
    return;
  }
  if (!place.querySelector("table")) place.replaceChildren(emptyTable());
  keyed(
    place.querySelector("tbody"),
    store.tenants,
    (one) => one.tenant,
    () => el("tr", {}, TENANT_COLUMNS.map((_column, index) => el(index ? "td" : "th", index ? {} : { scope: "row" }))),
    (row, one) => TENANT_COLUMNS.forEach(([, read], index) => setText(row.children[index], read(one))),
  );
}

function emptyTable() {
  const heads = TENANT_COLUMNS.map(([name]) => el("th", { scope: "col" }, name));
  return el("table", {}, el("thead", {}, el("tr", {}, heads)), el("tbody"));
}
