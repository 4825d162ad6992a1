/* The console: events of the stream update the store, and the changed parts of the page are drawn. */

import { watchOrders } from "./orders.js";
import { byId, setAttribute, setText } from "./dom.js";
import { clock } from "./format.js";
import { drawFleet, watchFleet } from "./fleet.js";
import { drawFigures, drawHealth } from "./health.js";
import { drawBatches, drawEvents, drawModels, drawTenants, drawUsage } from "./events.js";
import { closePanel, openFromAddress, redrawPanel, watchPanel } from "./panel.js";
import { requestPanel } from "./request_panel.js";
import { drawRequests, watchRequests } from "./requests.js";
import { Store } from "./store.js";
import { listen } from "./stream.js";
import { workerPanel } from "./worker_panel.js";

const store = new Store();
const panels = { request: requestPanel(store), worker: workerPanel(store) };
let isDrawing = false;

/* Kinds of events, and the part of the page that each set redraws. */
const VIEWS = [
  [["state", "health"], () => drawHealth(store)],
  [["state", "workers", "gone", "flows", "tenants", "request"], () => drawFigures(store)],
  [["state", "workers", "gone", "flows"], () => drawFleet(store)],
  [["state", "request"], () => drawRequests(store)],
  [["state", "event"], () => drawEvents(store)],
  [["state", "tenants"], () => drawTenants(store)],
  [["state", "models"], () => drawModels(store)],
  [["state", "usage"], () => drawUsage(store)],
  [["state", "batches"], () => drawBatches(store)],
  [["state", "workers", "gone", "flows"], redrawPanel],
];

/** Draw once per animation frame, however many events arrived. Hidden pages get no frames and draw nothing. */
function drawSoon() {
  if (isDrawing) return;
  isDrawing = true;
  requestAnimationFrame(() => {
    isDrawing = false;
    const changed = store.changed;
    store.changed = new Set();
    for (const [kinds, draw] of VIEWS) {
      if (kinds.some((kind) => changed.has(kind))) draw();
    }
    if (["state", "model_names", "default_mode"].some((kind) => changed.has(kind))) drawServed();
  });
}

function drawServed() {
  const models = store.modelNames.join(", ") || "no model yet";
  setText(byId("served"), `Serves ${models}${store.version ? ` · ${store.version}` : ""}`);
  byId("mode-order").hidden = !store.defaultMode;
  setText(byId("mode-order"), `Default mode: ${store.defaultMode} …`);
  setAttribute(byId("mode-order"), "disabled", store.ordersAllowed ? null : "");
}

function showConnection(state) {
  const node = byId("connection");
  if (node.dataset.state === state) return;
  node.dataset.state = state;
  document.body.dataset.connection = state;
  const now = clock(Date.now() / 1000);
  setText(node, state === "live" ? "Live" : `Connection lost at ${now}. The page shows the state at that time. Reconnecting …`);
}

watchPanel(panels);
watchFleet(store);
watchRequests(store);
watchOrders(store);
listen("/console/events", (kind, data) => {
  store.apply(kind, data);
  drawSoon();
}, showConnection);
addEventListener("hashchange", openFromAddress);
addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !byId("order").open) closePanel();
});
openFromAddress();
