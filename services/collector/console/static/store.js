/* What this page knows: the whole state once, then what changed. Nothing here touches the page. */

const ROWS_MAX = 200;

/** The newest state of everything, and which kinds of it have changed since somebody looked. */
export class Store {
  constructor() {
    this.workers = new Map();
    this.flows = [];
    this.requests = [];
    this.events = [];
    this.tenants = [];
    this.health = null;
    this.modelNames = [];
    this.version = "";
    this.mayAct = false;
    this.needsKey = true;
    this.mode = "";
    this.changed = new Set();
  }

  /** Takes one event of the stream. */
  take(kind, told) {
    const handlers = {
      state: () => this.takeState(told),
      workers: () => told.forEach((worker) => this.workers.set(worker.id, worker)),
      gone: () => told.forEach((id) => this.workers.delete(id)),
      flows: () => (this.flows = told),
      tenants: () => (this.tenants = told),
      health: () => (this.health = told),
      model_names: () => (this.modelNames = told),
      mode: () => (this.mode = told),
      request: () => (this.requests = [told, ...this.requests].slice(0, ROWS_MAX)),
      event: () => (this.events = [told, ...this.events].slice(0, ROWS_MAX)),
    };
    handlers[kind]();
    this.changed.add(kind);
  }

  /** The workers in the order in which people look for them. */
  sortedWorkers() {
    return [...this.workers.values()].sort((one, other) => one.id.localeCompare(other.id, "en", { numeric: true }));
  }

  takeState(told) {
    this.workers = new Map(told.workers.map((worker) => [worker.id, worker]));
    this.flows = told.flows;
    this.requests = told.requests.slice(0, ROWS_MAX);
    this.events = told.events.slice(0, ROWS_MAX);
    this.tenants = told.tenants;
    this.health = told.health;
    this.modelNames = told.model_names;
    this.version = told.version;
    this.mayAct = told.actions;
    this.needsKey = told.key_needed;
    this.mode = told.mode ?? "";
  }
}
