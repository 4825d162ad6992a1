/* Orders: what one does in words, a confirmation, the admin key, and what came of it. */

import { byId, el, setText } from "./dom.js";

const KEY = "baton-admin-key";
/* In this tab's storage only, and only after it was accepted. */
const ORDER_MS_MAX = 90_000;
/* A worker verifies another role before it says so. */
const REFUSED = [401, 403];

const ORDERS = {
  drain: {
    title: ({ id }) => `Drain ${id}?`,
    words: ({ id }) => `${id} takes no new requests, finishes those it has, hands its hot prefixes to workers that stay, and leaves.`,
    confirm: ({ id }) => `Drain ${id}`,
  },
  role: {
    title: ({ id }) => `Another role for ${id}`,
    words: ({ id, role }) => `${id} is a ${role} worker. Its engine runs on and no request is disturbed; it is placed for other legs.`,
    confirm: () => "Change role",
    choice: ({ role }) => ["New role", ["prefill", "decode", "both"].filter((one) => one !== role)],
  },
  mode: {
    title: () => "Routing mode",
    words: () => "How routers serve requests that do not ask for a mode themselves. Auto lets placement decide for each.",
    confirm: () => "Set mode",
    choice: ({ mode }) => ["Mode", ["auto", "aggregated", "disaggregated"], mode],
  },
};

const known = { store: null };
const asked = { kind: "", target: {}, opener: null };

/** Once. */
export function watchActions(store) {
  known.store = store;
  byId("mode-action").addEventListener("click", (event) => openAction("mode", event.currentTarget, { mode: store.mode }));
  byId("action-cancel").addEventListener("click", () => byId("action").close());
  byId("action").addEventListener("close", () => asked.opener?.isConnected && asked.opener.focus());
  byId("action-form").addEventListener("submit", (event) => {
    event.preventDefault();
    give();
  });
}

/** Asks whether it is meant. */
export function openAction(kind, opener, target) {
  Object.assign(asked, { kind, target, opener });
  const order = ORDERS[kind];
  setText(byId("action-title"), order.title(target));
  setText(byId("action-words"), order.words(target));
  setText(byId("action-confirm"), order.confirm(target));
  byId("action-choice").replaceChildren(...choiceOf(order, target));
  byId("action-key").value = sessionStorage.getItem(KEY) ?? "";
  tell("", "");
  setDone(false);
  byId("action").showModal();
}

function choiceOf(order, target) {
  if (!order.choice) return [];
  const [label, names, present] = order.choice(target);
  const options = names.map((name) => el("option", { value: name, selected: name === present }, name));
  return [el("label", {}, label, " ", el("select", { id: "action-value" }, options))];
}

async function give() {
  const { kind, target } = asked;
  const key = byId("action-key").value.trim();
  const body = { action: kind };
  if (target.id) body.worker_id = target.id;
  if (ORDERS[kind].choice) body[kind] = byId("action-value").value;
  byId("action-confirm").disabled = true;
  tell("waiting", "Given; waiting for the answer …");
  const [status, words] = await post(body, key);
  byId("action-confirm").disabled = false;
  tell(status === 200 ? "done" : "refused", words);
  if (status === 200 && key) sessionStorage.setItem(KEY, key);
  if (REFUSED.includes(status)) {
    sessionStorage.removeItem(KEY);
    byId("action-key").focus();
  }
  setDone(status === 200);
}

async function post(body, key) {
  const headers = { "content-type": "application/json" };
  if (key) headers.authorization = `Bearer ${key}`;
  try {
    const signal = AbortSignal.timeout(ORDER_MS_MAX);
    const answer = await fetch("/console/actions", { method: "POST", headers, body: JSON.stringify(body), signal });
    const told = await answer.json();
    return [answer.status, answer.ok ? told.told : (told.error?.message ?? `The collector answered ${answer.status}.`)];
  } catch (error) {
    return [0, error.name === "TimeoutError" ? "No answer came; see the events for what happens." : `It could not be sent: ${error.message}`];
  }
}

function tell(state, words) {
  byId("action-told").dataset.state = state;
  setText(byId("action-told"), words);
}

function setDone(isDone) {
  byId("action-confirm").hidden = isDone;
  byId("action-key-label").hidden = isDone || !known.store.needsKey;
  byId("action-choice").hidden = isDone;
  setText(byId("action-cancel"), isDone ? "Close" : "Cancel");
  if (isDone) byId("action-cancel").focus();
}
