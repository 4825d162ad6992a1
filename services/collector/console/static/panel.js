/* The panel at the side: one request or one worker at a time. Its address is kept, so that it can be sent to others. */

import { byId, setText } from "./dom.js";

const shown = { kind: "", id: "", opener: null };
let panels = {};

/** Once. Each panel has `title(id)`, `fill(body, id, given)` and, if it lives, `redraw(body, id)`. */
export function watchPanel(known) {
  panels = known;
  byId("panel-close").addEventListener("click", closePanel);
}

/** Shows something; the focus goes there, and back to `opener` at the end. */
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

/** Closes what is open. */
export function closePanel() {
  if (byId("panel").hidden) return;
  byId("panel").hidden = true;
  history.replaceState(null, "", location.pathname);
  const { opener } = shown;
  Object.assign(shown, { kind: "", id: "", opener: null });
  /* A row may have left its list meanwhile. */
  (opener?.isConnected ? opener : byId("requests")).focus();
}

/** Whether this is what is being looked at; an answer that comes late belongs to nobody. */
export function isOpen(kind, id) {
  return shown.kind === kind && shown.id === id;
}

/** After the store has changed. */
export function redrawPanel() {
  if (shown.kind) panels[shown.kind].redraw?.(byId("panel-body"), shown.id);
}

/** What the address names, as in `/console#request=router-d7`. */
export function openFromAddress() {
  const [kind, id] = location.hash.slice(1).split("=");
  if (panels[kind] && id && !isOpen(kind, decodeURIComponent(id))) openPanel(kind, decodeURIComponent(id));
}
