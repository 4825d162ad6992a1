/* The event stream, and reconnecting when the connection is lost. */

const KINDS = ["state", "workers", "gone", "flows", "tenants", "models", "usage", "batches", "health", "model_names", "default_mode", "request", "event"];
const RETRY_MS = [1000, 2000, 5000, 10000];

/**
 * Listen for as long as the page is open. `onEvent` gets each event, `onConnection` gets "live" or "lost". Browsers
 * reconnect by themselves, except after a response that is not a stream (such as a proxy's 502); then this function
 * reconnects, with growing pauses.
 */
export function listen(url, onEvent, onConnection) {
  let failures = 0;
  const open = () => {
    const source = new EventSource(url);
    for (const kind of KINDS) {
      source.addEventListener(kind, (event) => {
        onEvent(kind, JSON.parse(event.data));
        if (kind !== "state") return;
        failures = 0;
        onConnection("live");
      });
    }
    source.addEventListener("error", () => {
      onConnection("lost");
      if (source.readyState !== EventSource.CLOSED) return;
      setTimeout(open, RETRY_MS[Math.min(failures, RETRY_MS.length - 1)]);
      failures += 1;
    });
  };
  open();
}
