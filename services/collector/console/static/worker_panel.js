/* The worker panel: numbers, flows, and orders. */

import { openOrder } from "./orders.js";
import { el, keyed, setAttribute, setText } from "./dom.js";
import { UNKNOWN, counted, duration, percent, plural, rate } from "./format.js";
import { flowSentence, flowsOf, workerSentence } from "./sentences.js";

/** The panel for workers of this store. */
export function workerPanel(store) {
  return {
    title: (id) => `Worker ${id}`,
    fill: (body, id) => {
      const order = (kind) => (event) => openOrder(kind, event.currentTarget, store.workers.get(id) ?? { id });
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
  setText(lead, worker ? `${workerSentence(worker)}.` : `${id} is no longer part of the fleet.`);
  keyed(
    facts,
    worker ? factsOf(worker) : [],
    ([name]) => name,
    ([name]) => el("div", {}, el("dt", {}, name), el("dd")),
    (node, [, value]) => setText(node.lastElementChild, value),
  );
  const flows = flowsOf(store.flows, id).map(flowSentence);
  keyed(body.querySelector(".flows"), flows.length ? flows : ["No traffic."], (one) => one, (one) => el("li", {}, one));
  const canRole = worker && worker.role !== "store";
  for (const button of body.querySelectorAll("[data-order]")) {
    const can = store.ordersAllowed && worker && (button.dataset.order === "drain" || canRole);
    setAttribute(button, "disabled", can ? null : "");
  }
  const closed = "Orders are disabled: the collector does not listen on loopback and has no admin key.";
  setText(body.querySelector(".orders-why"), store.ordersAllowed ? "" : closed);
}

function factsOf(worker) {
  return [
    ["Model", `${worker.model || UNKNOWN}${worker.revision && worker.revision !== worker.model ? ` (${worker.revision})` : ""}`],
    ...(worker.adapters.length ? [["LoRA adapters", worker.adapters.join(", ")]] : []),
    ["Engine", `${worker.engine || UNKNOWN}${worker.host ? ` on ${worker.host}` : ""}`],
    ["Requests", `${counted(worker.legs)} assigned; ${plural(worker.waiting_tokens, "prompt token")} waiting for prefill`],
    ["Cache hits", worker.hit_ratio === null ? UNKNOWN : `${percent(worker.hit_ratio)} of prompt tokens`],
    ["Prefill", `${rate(worker.prompt_tokens_per_s)} tokens/s`],
    ["Decode", `${rate(worker.generation_tokens_per_s)} tokens/s`],
    ["Last report", worker.heard_s_ago ? `${duration(worker.heard_s_ago)} ago` : "just now"],
    ["Status", worker.note || UNKNOWN],
  ];
}
