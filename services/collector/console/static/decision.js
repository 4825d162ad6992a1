/* A placement: why these workers, what was predicted, what came of it, and who else was considered. */

import { el } from "./dom.js";
import { UNKNOWN, counted, duration, plural } from "./format.js";
import { describe } from "./parts.js";

const HEADINGS = { prefill: "Who could compute the prompt", decode: "Who could answer", whole: "Who could do both" };
const COLUMNS = [
  ["cached", "cached_tokens", counted],
  ["fetch", "fetched_tokens", counted],
  ["compute", "computed_tokens", counted],
  ["queue", "queue_s", duration],
  ["fetching", "fetch_s", duration],
  ["prefill", "prefill_s", duration],
  ["handoff", "handoff_s", duration],
  ["first step", "first_token_s", duration],
  ["decode", "decode_s", duration],
  ["others", "others_s", duration],
];
/* One in which all candidates have nothing is left out. */

/** All of it, as elements: the sentences come with it. */
export function decisionView(told, words) {
  const sentences = [words.headline, ...words.because, words.regret, words.reason].filter(Boolean);
  return [
    el("h3", {}, "Decision"),
    ...sentences.map((sentence) => el("p", {}, sentence)),
    facts(told, words),
    comparison(told),
    ...Object.keys(HEADINGS).flatMap((part) => candidatesView(part, told.candidates)),
    told.considered > 0 ? el("p", { class: "faint" }, considered(told)) : null,
    el("p", { class: "faint" }, "On a terminal: ", el("code", {}, `baton explain ${told.decision_id}`)),
  ].filter(Boolean);
}

function facts(told, words) {
  const sources = told.sources.map((source) => source.worker_id).join(", ");
  const rows = [
    ["Mode", `${told.mode || "not placed"}: ${words.why}`],
    ["Prompt", words.cached],
    sources ? ["KV from", sources] : null,
    told.attempt > 1 ? ["Attempt", `${told.attempt}; the one before is ${told.earlier}`] : null,
    ...words.targets.map((sentence) => ["Target", sentence]),
    ["First token", words.ttft],
  ];
  const shown = rows.filter((row) => row?.[1]);
  return el("dl", { class: "facts" }, shown.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))));
}

/* Predicted against measured: what was thought to take how long, and what did. */
function comparison(told) {
  const parts = told.parts.filter((part) => part.predicted_s > 0 || part.measured_s > 0);
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
  rows.push(sumOf(told));
  const heads = [["Part"], ["Predicted", "predicted"], ["Measured", "measured"], [""]].map(([word, kind]) =>
    el("th", { scope: "col" }, kind ? el("span", { class: `key ${kind}` }, word) : word),
  );
  return el("table", { class: "comparison" }, el("thead", {}, el("tr", {}, heads)), el("tbody", {}, rows));
}

function sumOf(told) {
  const total = (name) => told.parts.reduce((sum, part) => sum + (part[name] ?? 0), 0);
  const measured = told.measured ? duration(total("measured_s")) : UNKNOWN;
  const cells = [duration(total("predicted_s")), measured, ""].map((words) => el("td", {}, words));
  return el("tr", { class: "sum" }, el("th", { scope: "row" }, "in all"), cells);
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
  const heads = ["Worker", "cost", ...columns.map(([label]) => label)].map((word) => el("th", { scope: "col" }, word));
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
  const label = HEADINGS[part];
  return [el("h4", {}, label), el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": label }, table)];
}

function considered(told) {
  const all = plural(told.considered, "worker was", "workers were");
  const shown = new Set(told.candidates.map((one) => one.worker_id)).size;
  return `${all} considered${shown < told.considered ? "; the best are shown" : ""}. Tokens and seconds are predictions; the seconds are what the cost is made of.`;
}
