/* A decision: why these workers, predicted and measured times, and the other candidates. */

import { el } from "./dom.js";
import { UNKNOWN, counted, duration, plural } from "./format.js";
import { describe } from "./time_parts.js";

const HEADINGS = { prefill: "Candidates for prefill", decode: "Candidates for decode", whole: "Candidates for both phases" };
const COLUMNS = [
  ["cached", "cached_tokens", counted],
  ["fetch", "fetched_tokens", counted],
  ["compute", "computed_tokens", counted],
  ["queue", "queue_s", duration],
  ["fetching", "fetch_s", duration],
  ["prefill", "prefill_s", duration],
  ["handoff", "handoff_s", duration],
  ["decode prefill", "decode_prefill_s", duration],
  ["decode", "decode_s", duration],
  ["others", "others_s", duration],
];
/* A column without any value is left out. */

/** The elements of a decision; `text` has its sentences. */
export function decisionView(decision, text) {
  const sentences = [text.headline, ...text.because, text.regret, text.reason].filter(Boolean);
  return [
    el("h3", {}, "Decision"),
    ...sentences.map((sentence) => el("p", {}, sentence)),
    facts(decision, text),
    comparison(decision),
    ...Object.keys(HEADINGS).flatMap((part) => candidatesView(part, decision.candidates)),
    decision.considered > 0 ? el("p", { class: "faint" }, considered(decision)) : null,
    el("p", { class: "faint" }, "In a terminal: ", el("code", {}, `baton explain ${decision.decision_id}`)),
  ].filter(Boolean);
}

function facts(decision, text) {
  const sources = decision.sources.map((source) => source.worker_id).join(", ");
  const rows = [
    ["Mode", `${decision.mode || "not placed"}: ${text.why}`],
    ["Prompt", text.cached],
    sources ? ["KV from", sources] : null,
    decision.attempt > 1 ? ["Attempt", `${decision.attempt}; the previous one is ${decision.earlier}`] : null,
    ...text.targets.map((sentence) => ["Target", sentence]),
    ["Gap", text.gap],
    ["First token", text.ttft],
  ];
  const shown = rows.filter((row) => row?.[1]);
  return el("dl", { class: "facts" }, shown.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))));
}

/* Predicted and measured times, part by part. */
function comparison(decision) {
  const parts = decision.parts.filter((part) => part.predicted_s > 0 || part.measured_s > 0);
  if (!parts.length) return null;
  const widest = Math.max(...parts.flatMap((part) => [part.predicted_s, part.measured_s ?? 0]));
  const rows = parts.map((part) =>
    el(
      "tr",
      {},
      el("th", { scope: "row" }, describe(part).label),
      el("td", {}, duration(part.predicted_s)),
      el("td", {}, duration(part.measured_s)),
      el("td", { class: "bar" }, twoBars(part.predicted_s / widest, (part.measured_s ?? 0) / widest)),
    ),
  );
  rows.push(sumOf(decision));
  const heads = [["Part"], ["Predicted", "predicted"], ["Measured", "measured"], [""]].map(([label, kind]) =>
    el("th", { scope: "col" }, kind ? el("span", { class: `key ${kind}` }, label) : label),
  );
  return el("table", { class: "comparison" }, el("thead", {}, el("tr", {}, heads)), el("tbody", {}, rows));
}

function sumOf(decision) {
  const total = (name) => decision.parts.reduce((sum, part) => sum + (part[name] ?? 0), 0);
  const measured = decision.measured ? duration(total("measured_s")) : UNKNOWN;
  const cells = [duration(total("predicted_s")), measured, ""].map((text) => el("td", {}, text));
  return el("tr", { class: "sum" }, el("th", { scope: "row" }, "total"), cells);
}

function twoBars(predicted, measured) {
  const bar = (kind, share) => {
    const node = el("i", { class: kind });
    node.style.width = `${share > 0 ? Math.max(share * 100, 1) : 0}%`;
    return node;
  };
  return el("span", { class: "two-bars", "aria-hidden": "true" }, bar("predicted", predicted), bar("measured", measured));
}

function candidatesView(part, all) {
  const those = all.filter((one) => one.part === part);
  if (!those.length) return [];
  const columns = COLUMNS.filter(([, name]) => those.some((one) => one[name] > 0));
  const heads = ["Worker", "cost", ...columns.map(([label]) => label)].map((label) => el("th", { scope: "col" }, label));
  const rows = those.map((one) =>
    el(
      "tr",
      { class: one.chosen ? "chosen" : "" },
      el("th", { scope: "row" }, one.worker_id, el("span", { class: "why" }, one.why)),
      el("td", {}, el("b", {}, duration(one.cost_s))),
      columns.map(([, name, show]) => el("td", {}, one[name] ? show(one[name]) : UNKNOWN)),
    ),
  );
  const table = el("table", { class: "candidates" }, el("thead", {}, el("tr", {}, heads)), el("tbody", {}, rows));
  const heading = HEADINGS[part];
  return [el("h4", {}, heading), el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": heading }, table)];
}

function considered(decision) {
  const all = plural(decision.considered, "worker was", "workers were");
  const shown = new Set(decision.candidates.map((one) => one.worker_id)).size;
  return `${all} considered${shown < decision.considered ? "; the best are shown" : ""}. Tokens and times are predictions; the times add up to the cost.`;
}
