/* One worker: its numbers, what flows to and from it, and the orders it can be given. */

import { openAction } from "./actions.js";
import { el, keyed, setAttribute, setText } from "./dom.js";
import { UNKNOWN, duration, percent, plural, rate } from "./format.js";
import { flowSentence, flowsOf, workerSentence } from "./words.js";

/** The panel for workers of this store. */
export function workerPanel(store) {
  return {
    title: (id) => `Worker ${id}`,
    fill: (body, id) => {
      const order = (kind) => (event) => openAction(kind, event.currentTarget, store.workers.get(id) ?? { id });
      body.append(
        el("p", { class: "lead" }),
        el("dl", { class: "facts" }),
        el("h3", {}, "Flows"),
        el("ul", { class: "flows" }),
        el("h3", {}, "Orders"),
        el(
          "p",
          { class: "orders" },
          el("button", { type: "button", "data-order": "drain", onclick: order("drain") }, "Drain …"),
          el("button", { type: "button", "data-order": "role", onclick: order("role") }, "Change role …"),
        ),
        el("p", { class: "faint orders-why" }),
      );
      redraw(store, body, id);
    },
    redraw: (body, id) => redraw(store, body, id),
  };
}

function redraw(store, body, id) {
  const worker = store.workers.get(id);
  const [lead, facts] = body.children;
  setText(lead, worker ? `${workerSentence(worker)}.` : `${id} is not there any more.`);
  keyed(
    facts,
    worker ? factsOf(worker) : [],
    ([name]) => name,
    ([name]) => el("div", {}, el("dt", {}, name), el("dd")),
    (node, [, value]) => setText(node.lastElementChild, value),
  );
  const flows = flowsOf(store.flows, id).map(flowSentence);
  keyed(body.querySelector(".flows"), flows.length ? flows : ["Nothing flows."], (one) => one, (one) => el("li", {}, one));
  const canRole = worker && worker.role !== "store";
  for (const button of body.querySelectorAll("[data-order]")) {
    const can = store.mayAct && worker && (button.dataset.order === "drain" || canRole);
    setAttribute(button, "disabled", can ? null : "");
  }
  const closed = "No orders from here: the collector listens beyond this machine and has no admin key.";
  setText(body.querySelector(".orders-why"), store.mayAct ? "" : closed);
}

function factsOf(worker) {
  return [
    ["Model", `${worker.model || UNKNOWN}${worker.revision ? ` (${worker.revision})` : ""}`],
    ["Engine", `${worker.engine || UNKNOWN}${worker.host ? ` on ${worker.host}` : ""}`],
    ["Work", `${plural(worker.legs, "leg")}; ${plural(worker.waiting_tokens, "prompt token")} yet to compute`],
    ["Cache hits", worker.hit_ratio === null ? UNKNOWN : `${percent(worker.hit_ratio)} of prompt tokens`],
    ["Prompts", `${rate(worker.prompt_tokens_per_s)} tokens/s`],
    ["Answers", `${rate(worker.generation_tokens_per_s)} tokens/s`],
    ["Heard", worker.heard_s_ago ? `${duration(worker.heard_s_ago)} ago` : "just now"],
    ["It says", worker.note || UNKNOWN],
  ];
}
