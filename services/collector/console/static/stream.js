/* The stream of events, and what becomes of it when the connection is lost. */

const KINDS = ["state", "workers", "gone", "flows", "tenants", "health", "model_names", "mode", "request", "event"];
const AGAIN_MS = [1000, 2000, 5000, 10000];

/**
 * Listens for as long as the page is open. `take` hears each event; `tell` hears "live" and "lost". A browser reconnects by
 * itself, except after an answer that is no stream (a proxy's 502, say): then this does, ever more seldom.
 */
export function listen(url, take, tell) {
  let failures = 0;
  const open = () => {
    const source = new EventSource(url);
    for (const kind of KINDS) {
      source.addEventListener(kind, (event) => {
        take(kind, JSON.parse(event.data));
        if (kind !== "state") return;
        failures = 0;
        tell("live");
      });
    }
    source.addEventListener("error", () => {
      tell("lost");
      if (source.readyState !== EventSource.CLOSED) return;
      setTimeout(open, AGAIN_MS[Math.min(failures, AGAIN_MS.length - 1)]);
      failures += 1;
    });
  };
  open();
}
