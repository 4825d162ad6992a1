/* Orders: explanation, confirmation, admin key, and result. */

import { byId, el, setText } from "./dom.js";

const KEY = "baton-admin-key";
/* Kept in this tab's storage only, and only after the collector accepted it. */
const ORDER_MS_MAX = 90_000;
/* A worker verifies a new role before it responds. */
const REFUSED = [401, 403];

const ORDERS = {
  drain: {
    title: ({ id }) => `Drain ${id}?`,
    text: ({ id }) => `${id} accepts no new requests, finishes the running ones, copies its hot prefixes to other workers, and stops.`,
    confirm: ({ id }) => `Drain ${id}`,
  },
  role: {
    title: ({ id }) => `Change the role of ${id}`,
    text: ({ id, role }) => `${id} is a ${role} worker. Its engine keeps running and its requests continue; only new requests are placed by the new role.`,
    confirm: () => "Change role",
    choice: ({ role }) => ["New role", ["prefill", "decode", "both"].filter((one) => one !== role)],
  },
  mode: {
    title: () => "Default mode",
    text: () => "How routers serve requests that do not ask for a mode. With auto, placement chooses the mode of each request.",
    confirm: () => "Set default mode",
    choice: ({ mode }) => ["Mode", ["auto", "aggregated", "disaggregated"], mode],
  },
};

const context = { store: null };
const current = { kind: "", target: {}, opener: null };

/** Attach the listeners; call once. */
export function watchOrders(store) {
  context.store = store;
  byId("mode-order").addEventListener("click", (event) => openOrder("mode", event.currentTarget, { mode: store.defaultMode }));
  byId("order-cancel").addEventListener("click", () => byId("order").close());
  byId("order").addEventListener("close", () => current.opener?.isConnected && current.opener.focus());
  byId("order-form").addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
}

/** Open the dialog for an order. */
export function openOrder(kind, opener, target) {
  Object.assign(current, { kind, target, opener });
  const order = ORDERS[kind];
  setText(byId("order-title"), order.title(target));
  setText(byId("order-text"), order.text(target));
  setText(byId("order-confirm"), order.confirm(target));
  byId("order-choice").replaceChildren(...choiceOf(order, target));
  byId("order-key").value = sessionStorage.getItem(KEY) ?? "";
  showResult("", "");
  setDone(false);
  byId("order").showModal();
}

function choiceOf(order, target) {
  if (!order.choice) return [];
  const [label, names, present] = order.choice(target);
  const options = names.map((name) => el("option", { value: name, selected: name === present }, name));
  return [el("label", {}, label, " ", el("select", { id: "order-value" }, options))];
}

async function send() {
  const { kind, target } = current;
  const key = byId("order-key").value.trim();
  const body = { action: kind };
  if (target.id) body.worker_id = target.id;
  if (ORDERS[kind].choice) body[kind] = byId("order-value").value;
  byId("order-confirm").disabled = true;
  showResult("waiting", "Sent. Waiting for the response …");
  const [status, text] = await post(body, key);
  byId("order-confirm").disabled = false;
  showResult(status === 200 ? "done" : "refused", text);
  if (status === 200 && key) sessionStorage.setItem(KEY, key);
  if (REFUSED.includes(status)) {
    sessionStorage.removeItem(KEY);
    byId("order-key").focus();
  }
  setDone(status === 200);
}

async function post(body, key) {
  const headers = { "content-type": "application/json" };
  if (key) headers.authorization = `Bearer ${key}`;
  try {
    const signal = AbortSignal.timeout(ORDER_MS_MAX);
    const response = await fetch("/console/orders", { method: "POST", headers, body: JSON.stringify(body), signal });
    const reply = await response.json();
    return [response.status, response.ok ? reply.message : (reply.error?.message ?? `The collector replied with status ${response.status}.`)];
  } catch (error) {
    return [0, error.name === "TimeoutError" ? "No response in time. The events show the outcome." : `The order could not be sent: ${error.message}`];
  }
}

function showResult(state, text) {
  byId("order-result").dataset.state = state;
  setText(byId("order-result"), text);
}

function setDone(isDone) {
  byId("order-confirm").hidden = isDone;
  byId("order-key-label").hidden = isDone || !context.store.needsKey;
  byId("order-choice").hidden = isDone;
  setText(byId("order-cancel"), isDone ? "Close" : "Cancel");
  if (isDone) byId("order-cancel").focus();
}
