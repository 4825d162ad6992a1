/* One request: where its time went, and the decision that sent it there. */

import { decisionView } from "./decision.js";
import { el } from "./dom.js";
import { UNKNOWN, clock, counted, duration, isKnown, percent, plural } from "./format.js";
import { isOpen } from "./panel.js";
import { describe, partsBar, totalOf } from "./parts.js";
import { hasFailed, modeWords, restOf } from "./requests.js";

const ASK_MS_MAX = 15_000;
const COPIED_MS = 1500;
const ADDS_UP_WITHIN = 0.02;
const LEAST_SHARE = 0.01;

/** The panel for requests of this store; the id is the decision's. */
export function requestPanel(store) {
  return {
    title: () => "Request",
    fill: (body, id, given) => {
      const one = given ?? store.requests.find((request) => request.decision_id === id) ?? null;
      const story = el("div", { class: "story" }, one ? storyOf(one) : null);
      const decision = el("section", { class: "decision", "aria-label": "Decision", "aria-busy": "true" });
      body.append(story, decision);
      if (one && !one.decision_id) refuse(decision, "It ended before it was placed, so there is no decision.");
      else fetchDecision(id, one, story, decision);
    },
  };
}

async function fetchDecision(id, one, story, place) {
  place.replaceChildren(el("h3", {}, "Decision"), el("p", { class: "faint" }, "Asking the router that made it …"));
  let told;
  try {
    const signal = AbortSignal.timeout(ASK_MS_MAX);
    const answer = await fetch(`/console/requests/${encodeURIComponent(id)}`, { signal });
    told = await answer.json();
    if (!answer.ok) throw new Error(told.error?.message ?? `The collector answered ${answer.status}.`);
  } catch (error) {
    refuse(place, error.name === "TimeoutError" ? "Its router does not answer." : error.message);
    return;
  }
  if (!isOpen("request", id)) return;
  if (!one && told.request) story.replaceChildren(...storyOf(told.request));
  place.replaceChildren(...decisionView(told.decision, told.words));
  place.removeAttribute("aria-busy");
}

function refuse(place, words) {
  place.replaceChildren(el("h3", {}, "Decision"), el("p", { class: "faint" }, words));
  place.removeAttribute("aria-busy");
}

function storyOf(one) {
  return [
    el("p", { class: "lead" }, leadOf(one)),
    facts(one),
    el("h3", {}, "Where the time went"),
    one.parts.length ? waterfall(one) : el("p", { class: "faint" }, noParts(one)),
  ];
}

function leadOf(one) {
  const state = hasFailed(one) ? `Failed: ${one.reason || one.status}.` : one.slow ? "Slow." : "Well.";
  const first = isKnown(one.ttft_s) ? ` The first token came after ${duration(one.ttft_s)}` : " No token came";
  return `${state}${first}; it ended after ${duration(one.total_s)}.`;
}

function noParts(one) {
  return isKnown(one.ttft_s) ? "The parts of its time to the first token are not known." : "It never had a first token.";
}

function facts(one) {
  const cached = isKnown(one.cached_tokens) && one.prompt_tokens > 0 ? `, ${percent(one.cached_tokens / one.prompt_tokens)}` : "";
  const workers = [one.prefill_worker, one.decode_worker].filter(Boolean).join(" → ") || UNKNOWN;
  const rows = [
    ["Ended", `${clock(one.ended_at)}, status ${one.status}`],
    ["Tenant", one.tenant || "(none)"],
    ["Model", one.model],
    ["Workers", `${workers} (${modeWords(one.mode)})`],
    ["Prompt", `${plural(one.prompt_tokens, "token")}, ${counted(one.cached_tokens)} cached${cached}, ${counted(one.fetched_tokens)} fetched`],
    ["Answer", `${plural(one.tokens_out, "token")}${isKnown(one.itl_s) ? `, ${duration(one.itl_s)} between two` : ""}`],
    one.resumes ? ["Resumed", `${plural(one.resumes, "time")}: its stream went on at another worker`] : null,
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
    /* Without https the clipboard is closed to pages; then the text is selected and Ctrl+C does it. */
    await navigator.clipboard?.writeText(text).catch(() => undefined);
    button.textContent = navigator.clipboard ? "Copied" : "Selected";
    setTimeout(() => (button.textContent = "Copy"), COPIED_MS);
  });
  return [code, " ", button];
}

/* A line for each part, each bar beginning where the one before ends; then what they add up to. */
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
  const sum = agrees ? "first token" : `in all, of ${duration(one.ttft_s)}`;
  rows.push(line(sum, partsBar(one.parts, whole), whole, whole, "sum"));
  if (rest > 0) rows.push(line("then decode", partsBar([{ name: "decode", seconds: rest }], rest), rest, 0));
  const heads = ["Part", "", "Seconds", "Share"].map((word) => el("th", { scope: "col" }, word));
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
