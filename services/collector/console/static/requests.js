/* The list of recent requests: timing bars, filters, pause, and arrow keys. */

import { byId, el, keyed, setAttribute, setText } from "./dom.js";
import { UNKNOWN, clock, counted, duration, isKnown, plural } from "./format.js";
import { openPanel } from "./panel.js";
import { legendItems, partsBar } from "./time_parts.js";

const SCALE_QUANTILE = 0.95;
/* A full bar is this quantile; longer bars are cut, and their numbers still show the value. */
const STEPS = [1, 2, 5, 10];
/* Rounded up to one of these, so that the scale rarely changes. */
const PAGE_ROWS = 10;
const SHORT_MODES = { disaggregated: "P/D" };

const view = { which: "all", tenant: "", model: "", held: null };

/** Attach the listeners; call once. */
export function watchRequests(store) {
  byId("parts-legend").append(...legendItems());
  byId("requests-head").append(
    ...["Time", "", "Tenant / model, mode", "Tokens", "", "", "", ""].map((label) => el("span", {}, label)),
  );
  for (const button of document.querySelectorAll("[data-which]")) {
    button.addEventListener("click", () => filter(store, { which: button.dataset.which }));
  }
  byId("by-tenant").addEventListener("change", (event) => filter(store, { tenant: event.target.value }));
  byId("by-model").addEventListener("change", (event) => filter(store, { model: event.target.value }));
  byId("pause").addEventListener("click", () => {
    view.held = view.held ? null : store.requests;
    drawRequests(store);
  });
  byId("request-rows").addEventListener("keydown", moveFocus);
}

/** Draw the filtered list. */
export function drawRequests(store) {
  const all = view.held ?? store.requests;
  const shown = all.filter(isShown);
  drawFilters(store, all);
  const newer = view.held ? store.requests.findIndex((one) => one === view.held[0]) : 0;
  const held = view.held ? ` · paused, ${newer < 0 ? "many" : counted(newer)} newer` : "";
  setText(byId("requests-count"), `${shown.length === all.length ? "" : `${shown.length} of `}${all.length}${held}`);
  const scales = { ttft: scaleOf(shown.map((one) => one.ttft_s)), rest: scaleOf(shown.map(restOf)) };
  setText(byId("requests-head").children[4], `Time to first token, up to ${duration(scales.ttft)}`);
  setText(byId("requests-head").children[6], `Decode, up to ${duration(scales.rest)}`);
  const rows = byId("request-rows");
  keyed(rows, shown, keyOf, makeRow, (row, one) => drawRow(row, one, scales));
  keepOneTabStop(rows);
  const none = all.length ? "No request matches the filters." : "No requests yet. A request appears here when it finishes.";
  setText(byId("requests-empty"), none);
  for (const id of ["requests-head", "request-rows", "parts-legend"]) byId(id).hidden = shown.length === 0;
  byId("requests-empty").hidden = shown.length > 0;
}

/** Whether the request failed. */
export function hasFailed(one) {
  return one.status >= 400 || one.reason !== "";
}

/** Time after the first token, seconds; -1 when not known. */
export function restOf(one) {
  return isKnown(one.ttft_s) ? Math.max(one.total_s - one.ttft_s, 0) : -1;
}

/** The mode for display. */
export function modeText(mode) {
  return mode.replaceAll("_", " ") || "not placed";
}

function filter(store, change) {
  Object.assign(view, change);
  drawRequests(store);
}

function isShown(one) {
  const fits = view.which === "all" || (view.which === "slow" ? one.slow : hasFailed(one));
  return fits && (!view.tenant || one.tenant === view.tenant) && (!view.model || one.model === view.model);
}

function drawFilters(store, all) {
  for (const button of document.querySelectorAll("[data-which]")) {
    setAttribute(button, "aria-pressed", String(button.dataset.which === view.which));
  }
  setAttribute(byId("pause"), "aria-pressed", String(view.held !== null));
  setText(byId("pause"), view.held ? "Resume" : "Pause");
  offer(byId("by-tenant"), [...all.map((one) => one.tenant), ...store.tenants.map((one) => one.tenant)], view.tenant);
  offer(byId("by-model"), [...all.map((one) => one.model), ...store.modelNames], view.model);
}

function offer(select, names, chosen) {
  const known = [...new Set([...names, chosen])].filter(Boolean).sort();
  keyed(select, ["", ...known], (name) => name, (name) => el("option", { value: name }, name || "all"));
  if (select.value !== chosen) select.value = chosen;
}

function scaleOf(seconds) {
  const sorted = seconds.filter((one) => one > 0).sort((one, other) => one - other);
  const most = sorted[Math.min(Math.floor(SCALE_QUANTILE * sorted.length), sorted.length - 1)];
  if (most === undefined) return 0;
  const unit = 10 ** Math.floor(Math.log10(most));
  return unit * STEPS.find((step) => step * unit >= most);
}

function keyOf(one) {
  return one.decision_id || `${one.id} ${one.ended_at}`;
}

function makeRow(one) {
  const open = (event) => openPanel("request", one.decision_id || one.id, event.currentTarget, one);
  return el("li", {}, el("button", { type: "button", class: "row", tabindex: -1, "data-request": one.id, onclick: open }));
}

/* A row's text never changes; its bars follow the shared scale. */
function drawRow(row, one, scales) {
  const drawn = `${scales.ttft} ${scales.rest}`;
  if (row.dataset.drawn === drawn) return;
  row.dataset.drawn = drawn;
  const button = row.firstElementChild;
  const failed = hasFailed(one);
  setAttribute(button, "aria-label", sentenceOf(one));
  button.dataset.state = failed ? "failed" : one.slow ? "slow" : "ok";
  const rest = restOf(one);
  const parts = one.parts.length || !isKnown(one.ttft_s) ? one.parts : [{ name: "time to first token", seconds: one.ttft_s }];
  const mode = SHORT_MODES[one.mode] ?? modeText(one.mode);
  const outcome = failed ? one.reason || one.status : one.is_batch ? `${mode}, batch` : mode;
  button.replaceChildren(
    el("span", { class: "when" }, clock(one.ended_at)),
    el("span", { class: "mark", title: failed ? "failed" : one.slow ? "slow" : "well" }),
    el("span", { class: "who", title: one.tenant || one.model }, el("b", {}, one.tenant || shortName(one.model)), el("span", {}, outcome)),
    el("span", { class: "tokens" }, `${counted(one.prompt_tokens)} → ${counted(one.tokens_out)}`),
    el("span", { class: "bar-ttft" }, partsBar(parts, scales.ttft)),
    el("span", { class: "ttft" }, duration(one.ttft_s)),
    el("span", { class: "bar-rest" }, partsBar([{ name: "decode", seconds: Math.max(rest, 0) }], scales.rest)),
    el("span", { class: "rest" }, rest < 0 ? UNKNOWN : duration(rest)),
  );
}

/* Of a path or an id of Hugging Face, what tells models apart. */
function shortName(model) {
  return model.split("/").filter(Boolean).at(-1) ?? "";
}

function sentenceOf(one) {
  const state = hasFailed(one) ? `failed, ${one.reason || one.status}` : one.slow ? "slow" : "completed";
  const first = isKnown(one.ttft_s) ? `first token after ${duration(one.ttft_s)}, ` : "";
  const source = `${one.tenant ? `tenant ${one.tenant}, ` : ""}${one.model}, ${modeText(one.mode)}${one.is_batch ? ", line of a batch" : ""}`;
  return `${clock(one.ended_at)}, ${state}, ${source}, ${first}${plural(one.prompt_tokens, "prompt token")}, finished after ${duration(one.total_s)}`;
}

/* The list is a single tab stop: the focused row, else the newest. Arrow keys move within it. */
function keepOneTabStop(rows) {
  const buttons = [...rows.querySelectorAll(".row")];
  const stop = buttons.find((button) => button === document.activeElement) ?? buttons[0];
  for (const button of buttons) button.tabIndex = button === stop ? 0 : -1;
}

function moveFocus(event) {
  const buttons = [...event.currentTarget.querySelectorAll(".row")];
  const at = buttons.indexOf(document.activeElement);
  const to = {
    ArrowDown: at + 1,
    ArrowUp: at - 1,
    PageDown: at + PAGE_ROWS,
    PageUp: at - PAGE_ROWS,
    Home: 0,
    End: buttons.length - 1,
  }[event.key];
  if (at < 0 || to === undefined) return;
  event.preventDefault();
  buttons[Math.min(Math.max(to, 0), buttons.length - 1)].focus();
  keepOneTabStop(event.currentTarget);
}
