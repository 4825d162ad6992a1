/* The page's state: the whole state at first, then changes. Nothing here touches the DOM. */

const ROWS_MAX = 200;

/** The newest state, and the kinds of events that have arrived since the last drawing. */
export class Store {
  constructor() {
    this.workers = new Map();
    this.flows = [];
    this.requests = [];
    this.events = [];
    this.tenants = [];
    this.models = [];
    this.usage = { month: "", rows: [], more: 0 };
    this.batches = { rows: [], more: 0 };
    this.health = null;
    this.modelNames = [];
    this.version = "";
    this.ordersAllowed = false;
    this.needsKey = true;
    this.defaultMode = "";
    this.changed = new Set();
  }

  /** Apply one event of the stream. */
  apply(kind, data) {
    const handlers = {
      state: () => this.setState(data),
      workers: () => data.forEach((worker) => this.workers.set(worker.id, worker)),
      gone: () => data.forEach((id) => this.workers.delete(id)),
      flows: () => (this.flows = data),
      tenants: () => (this.tenants = data),
      models: () => (this.models = data),
      usage: () => (this.usage = data),
      batches: () => (this.batches = data),
      health: () => (this.health = data),
      model_names: () => (this.modelNames = data),
      default_mode: () => (this.defaultMode = data),
      request: () => (this.requests = [data, ...this.requests].slice(0, ROWS_MAX)),
      event: () => (this.events = [data, ...this.events].slice(0, ROWS_MAX)),
    };
    handlers[kind]();
    this.changed.add(kind);
  }

  /** The workers by id; numbers within ids sort as numbers. */
  sortedWorkers() {
    return [...this.workers.values()].sort((one, other) => one.id.localeCompare(other.id, "en", { numeric: true }));
  }

  setState(data) {
    this.workers = new Map(data.workers.map((worker) => [worker.id, worker]));
    this.flows = data.flows;
    this.requests = data.requests.slice(0, ROWS_MAX);
    this.events = data.events.slice(0, ROWS_MAX);
    this.tenants = data.tenants;
    this.models = data.models;
    this.usage = data.usage;
    this.batches = data.batches;
    this.health = data.health;
    this.modelNames = data.model_names;
    this.version = data.version;
    this.ordersAllowed = data.orders_allowed;
    this.needsKey = data.key_needed;
    this.defaultMode = data.default_mode ?? "";
  }
}
