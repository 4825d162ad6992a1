/* The console: what the stream says goes into the store, and what changed there is drawn. */

import { watchActions } from "./actions.js";
import { byId, setAttribute, setText } from "./dom.js";
import { clock } from "./format.js";
import { drawFleet, watchFleet } from "./fleet.js";
import { drawFigures, drawHealth } from "./health.js";
import { drawEvents, drawTenants } from "./happenings.js";
import { closePanel, openFromAddress, redrawPanel, watchPanel } from "./panel.js";
import { requestPanel } from "./request_panel.js";
import { drawRequests, watchRequests } from "./requests.js";
import { Store } from "./store.js";
import { listen } from "./stream.js";
import { workerPanel } from "./worker_panel.js";

const store = new Store();
const panels = { request: requestPanel(store), worker: workerPanel(store) };
let isDrawing = false;

/* Which changes concern which part of the page. */
const VIEWS = [
  [["state", "health"], () => drawHealth(store)],
  [["state", "workers", "gone", "flows", "tenants", "request"], () => drawFigures(store)],
  [["state", "workers", "gone", "flows"], () => drawFleet(store)],
  [["state", "request"], () => drawRequests(store)],
  [["state", "event"], () => drawEvents(store)],
  [["state", "tenants"], () => drawTenants(store)],
  [["state", "workers", "gone", "flows"], redrawPanel],
];

/** Draws once for all that came since the last picture; a page that nobody sees draws nothing. */
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
    if (["state", "model_names", "mode"].some((kind) => changed.has(kind))) drawServed();
  });
}

function drawServed() {
  const models = store.modelNames.join(", ") || "no model yet";
  setText(byId("served"), `serves ${models}${store.version ? ` · ${store.version}` : ""}`);
  byId("mode-action").hidden = !store.mode;
  setText(byId("mode-action"), `Mode: ${store.mode} …`);
  setAttribute(byId("mode-action"), "disabled", store.mayAct ? null : "");
}

function tellConnection(state) {
  const node = byId("connection");
  if (node.dataset.state === state) return;
  node.dataset.state = state;
  document.body.dataset.connection = state;
  const now = clock(Date.now() / 1000);
  setText(node, state === "live" ? "Live" : `Connection lost at ${now}; what you see is from then. Trying again …`);
}

watchPanel(panels);
watchFleet(store);
watchRequests(store);
watchActions(store);
listen("/console/events", (kind, told) => {
  store.take(kind, told);
  drawSoon();
}, tellConnection);
addEventListener("hashchange", openFromAddress);
addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !byId("action").open) closePanel();
});
openFromAddress();
