/* The side panel: one request or one worker at a time. The page's address names it, so that links to it work. */

import { byId, setText } from "./dom.js";

const shown = { kind: "", id: "", opener: null };
let panels = {};

/** Call once. Each panel has `title(id)`, `fill(body, id, given)` and, if it follows the store, `redraw(body, id)`. */
export function watchPanel(known) {
  panels = known;
  byId("panel-close").addEventListener("click", closePanel);
}

/** Open the panel and move the focus there; closing returns the focus to `opener`. */
export function openPanel(kind, id, opener = null, given = null) {
  Object.assign(shown, { kind, id, opener });
  const body = byId("panel-body");
  body.replaceChildren();
  body.scrollTop = 0;
  setText(byId("panel-title"), panels[kind].title(id));
  byId("panel").hidden = false;
  panels[kind].fill(body, id, given);
  history.replaceState(null, "", `#${kind}=${encodeURIComponent(id)}`);
  byId("panel-title").focus();
}

/** Close the panel. */
export function closePanel() {
  if (byId("panel").hidden) return;
  byId("panel").hidden = true;
  history.replaceState(null, "", location.pathname);
  const { opener } = shown;
  Object.assign(shown, { kind: "", id: "", opener: null });
  /* The opener may have been removed from its list. */
  (opener?.isConnected ? opener : byId("requests")).focus();
}

/** Whether the panel still shows this; late responses for another panel are dropped. */
export function isOpen(kind, id) {
  return shown.kind === kind && shown.id === id;
}

/** Call after the store has changed. */
export function redrawPanel() {
  if (shown.kind) panels[shown.kind].redraw?.(byId("panel-body"), shown.id);
}

/** Open what the address names, such as `/console#request=router-d7`. */
export function openFromAddress() {
  const [kind, id] = location.hash.slice(1).split("=");
  if (panels[kind] && id && !isOpen(kind, decodeURIComponent(id))) openPanel(kind, decodeURIComponent(id));
}
