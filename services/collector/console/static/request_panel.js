/* The request panel: timings, and the decision that placed the request. */

import { decisionView } from "./decision.js";
import { el } from "./dom.js";
import { UNKNOWN, clock, counted, duration, isKnown, percent, plural } from "./format.js";
import { isOpen } from "./panel.js";
import { describe, partsBar, totalOf } from "./time_parts.js";
import { hasFailed, modeText, restOf } from "./requests.js";

const ASK_MS_MAX = 15_000;
const COPIED_MS = 1500;
const ADDS_UP_WITHIN = 0.02;
const LEAST_SHARE = 0.01;

/** The panel for requests of this store; its id is the decision id. */
export function requestPanel(store) {
  return {
    title: () => "Request",
    fill: (body, id, given) => {
      const one = given ?? store.requests.find((request) => request.decision_id === id) ?? null;
      const details = el("div", { class: "details" }, one ? detailsOf(one) : null);
      const decision = el("section", { class: "decision", "aria-label": "Decision", "aria-busy": "true" });
      body.append(details, decision);
      if (one && !one.decision_id) showReason(decision, "The request ended before it was placed, so there is no decision.");
      else fetchDecision(id, one, details, decision);
    },
  };
}

async function fetchDecision(id, one, details, place) {
  place.replaceChildren(el("h3", {}, "Decision"), el("p", { class: "faint" }, "Loading it from its router …"));
  let reply;
  try {
    const signal = AbortSignal.timeout(ASK_MS_MAX);
    const response = await fetch(`/console/requests/${encodeURIComponent(id)}`, { signal });
    reply = await response.json();
    if (!response.ok) throw new Error(reply.error?.message ?? `The collector replied with status ${response.status}.`);
  } catch (error) {
    showReason(place, error.name === "TimeoutError" ? "Its router does not respond." : error.message);
    return;
  }
  if (!isOpen("request", id)) return;
  if (!one && reply.request) details.replaceChildren(...detailsOf(reply.request));
  place.replaceChildren(...decisionView(reply.decision, reply.text));
  place.removeAttribute("aria-busy");
}

function showReason(place, text) {
  place.replaceChildren(el("h3", {}, "Decision"), el("p", { class: "faint" }, text));
  place.removeAttribute("aria-busy");
}

function detailsOf(one) {
  return [
    el("p", { class: "lead" }, leadOf(one)),
    facts(one),
    el("h3", {}, "Time to first token, by part"),
    one.parts.length ? waterfall(one) : el("p", { class: "faint" }, noParts(one)),
  ];
}

function leadOf(one) {
  const state = hasFailed(one) ? `Failed: ${one.reason || one.status}.` : one.slow ? "Slow." : "Completed.";
  const first = isKnown(one.ttft_s) ? ` First token after ${duration(one.ttft_s)}` : " No token";
  return `${state}${first}, finished after ${duration(one.total_s)}.`;
}

function noParts(one) {
  return isKnown(one.ttft_s) ? "The router did not measure the parts of this request." : "The request produced no token.";
}

function facts(one) {
  const cached = isKnown(one.cached_tokens) && one.prompt_tokens > 0 ? `, ${percent(one.cached_tokens / one.prompt_tokens)}` : "";
  const workers = [one.prefill_worker, one.decode_worker].filter(Boolean).join(" → ") || UNKNOWN;
  const rows = [
    ["Ended", `${clock(one.ended_at)}, status ${one.status}`],
    ["Tenant", one.tenant || "(none)"],
    ["Model", one.model],
    ["Workers", `${workers} (${modeText(one.mode)})`],
    ["Prompt", `${plural(one.prompt_tokens, "token")}, ${counted(one.cached_tokens)} cached${cached}, ${counted(one.fetched_tokens)} fetched`],
    ["Completion", `${plural(one.tokens_out, "token")}${isKnown(one.itl_s) ? `, ITL ${duration(one.itl_s)}` : ""}`],
    one.resumes ? ["Resumed", `${plural(one.resumes, "time")}: another worker continued its stream`] : null,
    ["Request", copyable(one.id)],
    one.trace_id ? ["Trace", copyable(one.trace_id)] : null,
  ];
  return el("dl", { class: "facts" }, rows.filter(Boolean).map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))));
}

function copyable(text) {
  const code = el("code", {}, text);
  const button = el("button", { type: "button", class: "copy", "aria-label": `Copy ${text}` }, "Copy");
  button.addEventListener("click", async () => {
    getSelection().selectAllChildren(code);
    /* Without https pages cannot use the clipboard; then the text stays selected for Ctrl+C. */
    await navigator.clipboard?.writeText(text).catch(() => undefined);
    button.textContent = navigator.clipboard ? "Copied" : "Selected";
    setTimeout(() => (button.textContent = "Copy"), COPIED_MS);
  });
  return [code, " ", button];
}

/* One row for each part; each bar starts where the previous one ends. The last rows are totals. */
function waterfall(one) {
  const whole = totalOf(one.parts);
  const rest = restOf(one);
  const rows = [];
  let at = 0;
  for (const part of one.parts.filter(({ seconds }) => seconds > 0)) {
    rows.push(line(describe(part).label, partsBar([part], whole, at), part.seconds, whole));
    at += part.seconds;
  }
  const agrees = Math.abs(whole - one.ttft_s) <= ADDS_UP_WITHIN * Math.max(one.ttft_s, 1e-6);
  const sum = agrees ? "first token" : `total, of ${duration(one.ttft_s)}`;
  rows.push(line(sum, partsBar(one.parts, whole), whole, whole, "sum"));
  if (rest > 0) rows.push(line("then decode", partsBar([{ name: "decode", seconds: rest }], rest), rest, 0));
  const heads = ["Part", "", "Time", "Share"].map((label) => el("th", { scope: "col" }, label));
  return el("table", { class: "waterfall" }, el("thead", {}, el("tr", {}, heads)), el("tbody", {}, rows));
}

function shareOf(seconds, whole) {
  return seconds / whole < LEAST_SHARE ? `< ${percent(LEAST_SHARE)}` : percent(seconds / whole);
}

function line(name, bar, seconds, whole, kind = "") {
  return el(
    "tr",
    { class: kind },
    el("th", { scope: "row" }, name),
    el("td", { class: "bar" }, bar),
    el("td", {}, duration(seconds)),
    el("td", {}, whole > 0 ? shareOf(seconds, whole) : ""),
  );
}
