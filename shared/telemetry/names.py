"""Every metric, in one flat file; dashboards, alerts and code are checked against it. Spans: see ``span_names``."""

from __future__ import annotations

from shared.telemetry.metrics import LISTED, Kind, Metric, counter, gauge, listed, seconds, token_seconds

METRICS = LISTED
"""Every metric by its name."""

OVERHEAD_BUCKETS_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1)

# Router (/metrics of each router process).
ROUTER_REQUESTS = counter(
    "baton_router_requests_total", "requests", "Requests that ended, by HTTP status.", "mode", "status"
)
ROUTER_IN_FLIGHT = gauge("baton_router_requests_in_flight", "requests", "Requests being served now.")
ROUTER_REFUSALS = counter("baton_router_refusals_total", "requests", "Requests that failed, by reason.", "reason")
ROUTER_RETRIES = counter("baton_router_retries_total", "legs", "Legs that were placed again, by reason.", "reason")
ROUTER_RESUMES = counter(
    "baton_router_resumes_total", "streams", "Streams that went on elsewhere, by why they broke off.", "reason"
)
ROUTER_RESUME = seconds("baton_router_resume_seconds", "From the last data before a stream broke off to the next data.")
ROUTER_TTFT = seconds("baton_router_time_to_first_token_seconds", "From request to first token.", "mode")
ROUTER_ITL = token_seconds("baton_router_inter_token_latency_seconds", "From a stream's piece to its next.", "mode")
ROUTER_TPOT = token_seconds(
    "baton_router_time_per_output_token_seconds", "Mean time between tokens after the first, per request.", "mode"
)
ROUTER_E2E = seconds("baton_router_request_seconds", "From request to its last byte.", "mode")
ROUTER_GOALS = counter(
    "baton_router_goals_total",
    "requests",
    "Requests, by what became of their targets: goodput is what met them.",
    "goal",
)
ROUTER_TRACES = counter("baton_router_traces_total", "traces", "Traces, by why they were kept, or were not.", "why")
ROUTER_PLACEMENT = seconds(
    "baton_router_placement_seconds", "Time spent to choose workers.", buckets=OVERHEAD_BUCKETS_S
)
ROUTER_TTFT_PREDICTED = listed(
    Metric(
        name="baton_router_predicted_to_measured_ttft_ratio",
        kind=Kind.HISTOGRAM,
        unit="ratio",
        meaning="Predicted time from placement to first token, divided by the measured one.",
        labels=("mode",),
        buckets=(0.1, 0.25, 0.5, 0.67, 0.8, 0.9, 1.0, 1.11, 1.25, 1.5, 2.0, 4.0, 10.0),
    )
)
ROUTER_LEARNED = gauge(
    "baton_router_learned_seconds",
    "seconds",
    "What a unit of work takes on a worker, as learned from what it measured: for a step, a token, a pair of tokens.",
    "worker_id",
    "coefficient",
)
ROUTER_PROMPT_TOKENS = counter("baton_router_prompt_tokens_total", "tokens", "Prompt tokens of ended requests.")
ROUTER_COMPLETION_TOKENS = counter("baton_router_completion_tokens_total", "tokens", "Tokens relayed to clients.")
ROUTER_CACHED_PREDICTED = counter(
    "baton_router_cached_tokens_predicted_total", "tokens", "Prompt tokens that placement expected to be cached."
)
ROUTER_CACHED_ACTUAL = counter(
    "baton_router_cached_tokens_actual_total", "tokens", "Prompt tokens that the engine found cached."
)
ROUTER_PLACEMENTS = counter(
    "baton_router_placements_total", "requests", "Ended requests by how they were placed last, and why.", "mode", "why"
)
ROUTER_QUEUE = gauge("baton_router_requests_waiting", "requests", "Requests that wait for their turn.")
ROUTER_QUEUE_MAX = gauge("baton_router_requests_waiting_max", "requests", "Requests that may wait.")
ROUTER_ADMISSION = seconds(
    "baton_router_admission_wait_seconds", "Of requests that had to wait for their turn, until that was decided."
)
ROUTER_TENANT_REQUESTS = counter(
    "baton_router_tenant_requests_total", "requests", "Requests that ended, by how.", "tenant", "outcome"
)
ROUTER_TENANT_TOKENS = counter(
    "baton_router_tenant_tokens_total", "tokens", "Prompt tokens computed, and tokens generated.", "tenant", "kind"
)
ROUTER_INDEX_STATE = gauge(
    "baton_router_index_state", "1", "1 for the state that a worker's prefix index is in.", "worker_id", "state"
)
ROUTER_INDEX_BLOCKS = gauge(
    "baton_router_index_blocks", "blocks", "Blocks that the prefix index knows of a worker.", "worker_id"
)
ROUTER_INDEX_COMPILED = gauge(
    "baton_router_index_compiled", "1", "1 when the prefix index is the compiled one, 0 when it runs in Python."
)
ROUTER_TOKEN_PARITY = gauge(
    "baton_router_token_parity",
    "1",
    "1 for what is known of a worker's tokens: the router makes the same (agrees), others (differs), or unknown.",
    "worker_id",
    "state",
)
ROUTER_SNAPSHOTS = counter(
    "baton_router_snapshots_total", "asks", "KV snapshots asked for: a worker came, or events were missed."
)
ROUTER_ORPHANS = counter(
    "baton_router_orphaned_legs_total",
    "legs",
    "Legs that a worker served and nobody awaited (served), or that were awaited and not served (awaited).",
    "kind",
)
ROUTER_OTHERS = gauge("baton_router_others", "routers", "Other routers that this one hears: none when it is alone.")

OF_WORKER = ("worker_id", "role")

# Workers (exposed by the metrics collector, from load reports).
WORKER_RUNNING = gauge("baton_worker_requests_running", "requests", "Requests in the engine's batch.", *OF_WORKER)
WORKER_WAITING = gauge("baton_worker_requests_waiting", "requests", "Requests in the engine's queue.", *OF_WORKER)
WORKER_WAITING_TOKENS = gauge(
    "baton_worker_waiting_tokens", "tokens", "Prompt tokens accepted and not yet computed.", *OF_WORKER
)
WORKER_LEGS = gauge("baton_worker_legs", "legs", "Legs being served.", *OF_WORKER)
WORKER_LEGS_MAX = gauge("baton_worker_legs_max", "legs", "Legs that it may serve at once.", *OF_WORKER)
WORKER_STEP_SECONDS = counter(
    "baton_worker_step_seconds_total",
    "seconds",
    "Time that its engine spent in steps; an idle one takes none.",
    *OF_WORKER,
)
WORKER_KV_USED = gauge("baton_worker_kv_used_ratio", "ratio", "Part of the KV blocks in use, 0 to 1.", *OF_WORKER)
WORKER_PROMPT_TOKENS = counter(
    "baton_worker_prompt_tokens_total",
    "tokens",
    "Prompt tokens by where their KV came from: computed, cached or received.",
    *OF_WORKER,
    "source",
)
WORKER_GENERATION_TOKENS = counter("baton_worker_generation_tokens_total", "tokens", "Tokens generated.", *OF_WORKER)
WORKER_RECEIVED_BYTES = counter(
    "baton_worker_kv_received_bytes_total", "bytes", "KV bytes read from other workers.", *OF_WORKER
)
WORKER_RECEIVED_SECONDS = counter(
    "baton_worker_kv_received_seconds_total", "seconds", "Time spent reading KV from other workers.", *OF_WORKER
)
WORKER_PREEMPTIONS = counter(
    "baton_worker_preemptions_total", "requests", "Requests thrown out of the batch for lack of KV.", *OF_WORKER
)
WORKER_PREFILL_SPEED = gauge(
    "baton_worker_prefill_tokens_per_second", "tokens/s", "Prefill speed measured lately.", *OF_WORKER
)
WORKER_TOKEN_INTERVAL = gauge(
    "baton_worker_token_interval_seconds", "seconds", "Time between a stream's tokens lately.", *OF_WORKER
)
WORKER_TOKENS_IN = gauge(
    "baton_worker_tokens_in_per_second", "tokens/s", "Prompt tokens finished, mean of 10 s.", *OF_WORKER
)
WORKER_TOKENS_OUT = gauge(
    "baton_worker_tokens_out_per_second", "tokens/s", "Tokens generated, mean of 10 s.", *OF_WORKER
)
WORKER_REQUESTS = counter(
    "baton_worker_requests_total",
    "requests",
    "Ended requests whose completion this worker generated.",
    *OF_WORKER,
    "mode",
)
WORKER_FAILURES = counter(
    "baton_worker_failures_total",
    "requests",
    "Requests that did not end well and whose completion this worker was to generate, by reason.",
    *OF_WORKER,
    "reason",
)
WORKER_TTFT = seconds("baton_worker_time_to_first_token_seconds", "TTFT of the requests that it generated.", *OF_WORKER)
WORKER_ITL = token_seconds(
    "baton_worker_inter_token_latency_seconds", "ITL of the requests that it generated, means of each.", *OF_WORKER
)
WORKER_E2E = seconds("baton_worker_request_seconds", "Duration of the requests that it generated.", *OF_WORKER)
WORKER_CACHED_MISSED = counter(
    "baton_worker_cached_tokens_missed_total",
    "tokens",
    "Of the prompts that it computed: sum of the distances between cached tokens expected and found.",
    *OF_WORKER,
)
WORKER_PHASE = gauge("baton_worker_phase", "1", "1 for the phase that the worker is in.", *OF_WORKER, "phase")
WORKER_SILENCE = gauge("baton_worker_silence_seconds", "seconds", "Since it was last heard.", *OF_WORKER)

# The KV exchange (exposed by the metrics collector, from load reports of workers whose connector tells).
WORKER_LEASES_HELD = gauge("baton_worker_kv_leases_held", "leases", "Leases on its blocks now.", *OF_WORKER)
WORKER_PINNED = gauge("baton_worker_kv_pinned_blocks", "blocks", "Blocks that leases pin now.", *OF_WORKER)
WORKER_READS_RUNNING = gauge("baton_worker_kv_reads_running", "reads", "Reads from others under way.", *OF_WORKER)
WORKER_LEASES = counter(
    "baton_worker_kv_leases_total", "leases", "Granted, refused, released, expired.", *OF_WORKER, "outcome"
)
WORKER_READS = counter("baton_worker_kv_reads_total", "reads", "Ended: done or failed.", *OF_WORKER, "outcome")
WORKER_REFUSED = counter(
    "baton_worker_cache_refusals_total", "requests", "Requests below their cache hit threshold.", *OF_WORKER
)
WORKER_RECOMPUTED = counter(
    "baton_worker_recomputed_tokens_total", "tokens", "Of decode legs, beyond the tail: silent re-prefill.", *OF_WORKER
)

# Stores (exposed by the metrics collector, from load reports). In memory is host, in files is disk.
STORE_BLOCKS = gauge("baton_store_blocks", "blocks", "Blocks that it keeps.", "worker_id", "tier")
STORE_BLOCKS_MAX = gauge("baton_store_blocks_max", "blocks", "Blocks that there is room for.", "worker_id", "tier")
STORE_BYTES = gauge("baton_store_bytes", "bytes", "KV bytes that it keeps.", "worker_id", "tier")
STORE_DISK_FREE = gauge(
    "baton_store_disk_free_bytes", "bytes", "Free on the file system that its files are on.", "worker_id"
)
STORE_WAITING = gauge(
    "baton_store_blocks_waiting", "blocks", "Blocks to be loaded from files, or saved there.", "worker_id", "kind"
)
STORE_MOVED = counter(
    "baton_store_moved_blocks_total",
    "blocks",
    "Blocks loaded from files (done, or damaged there) and saved there (done or failed).",
    "worker_id",
    "kind",
    "outcome",
)
STORE_EVICTED = counter(
    "baton_store_evicted_blocks_total", "blocks", "Blocks that made room for others.", "worker_id", "tier"
)
STORE_GRANTED = counter(
    "baton_store_granted_bytes_total",
    "bytes",
    "KV bytes granted to readers. What it takes is baton_worker_kv_received_bytes_total.",
    "worker_id",
)

# The fleet (exposed by the metrics collector; totals outlive the workers that they came from).
FLEET_WORKERS = gauge("baton_fleet_workers", "workers", "Workers by role and phase.", "role", "phase")
FLEET_WORKERS_LOST = counter("baton_fleet_workers_lost_total", "workers", "Workers that were declared lost.")
FLEET_TERM = gauge("baton_fleet_term", "terms", "How often the lead over the fleet changed hands.")
PLANNER_WANTED = gauge("baton_planner_workers_wanted", "workers", "Workers that the planner wants.", "model", "role")
PLANNER_LOAD = gauge("baton_planner_load_ratio", "ratio", "Work over what its workers can do.", "model", "role")
PLANNER_CHANGES = counter("baton_planner_changes_total", "changes", "Changes that it decided.", "action", "role")
FLEET_REQUESTS = counter(
    "baton_fleet_requests_total", "requests", "Requests that ended, by HTTP status.", "model", "mode", "status"
)
FLEET_FAILURES = counter(
    "baton_fleet_failures_total", "requests", "Requests that did not end well, by reason.", "reason"
)
FLEET_REQUEST_RATE = gauge("baton_fleet_requests_per_second", "requests/s", "Requests ended, mean of 10 s.")
FLEET_TOKENS_IN = gauge(
    "baton_fleet_tokens_in_per_second", "tokens/s", "Prompt tokens of ended requests, mean of 10 s."
)
FLEET_TOKENS_OUT = gauge(
    "baton_fleet_tokens_out_per_second", "tokens/s", "Completion tokens of ended requests, mean of 10 s."
)
FLEET_REQUEST_TOKENS = counter(
    "baton_fleet_request_tokens_total", "tokens", "Prompt and completion tokens of ended requests.", "kind"
)
FLEET_PROMPT_TOKENS = counter(
    "baton_fleet_prompt_tokens_total", "tokens", "Like baton_worker_prompt_tokens_total, of all workers.", "source"
)
FLEET_GENERATION_TOKENS = counter("baton_fleet_generation_tokens_total", "tokens", "Tokens generated by all workers.")
FLEET_RECEIVED_BYTES = counter("baton_fleet_kv_received_bytes_total", "bytes", "KV bytes read by all workers.")
FLEET_TTFT = seconds("baton_fleet_time_to_first_token_seconds", "From request to first token.", "model", "mode")
FLEET_ITL = token_seconds(
    "baton_fleet_inter_token_latency_seconds",
    "Mean time between tokens after the first, per request.",
    "model",
    "mode",
)
FLEET_E2E = seconds("baton_fleet_request_seconds", "From request to its last byte.", "model", "mode")
FLEET_CACHED_PREDICTED = counter(
    "baton_fleet_cached_tokens_predicted_total", "tokens", "Cached tokens expected, where the true number is known."
)
FLEET_CACHED_ACTUAL = counter(
    "baton_fleet_cached_tokens_actual_total", "tokens", "Cached tokens found, where a prediction is known."
)
FLEET_CACHED_MISSED = counter(
    "baton_fleet_cached_tokens_missed_total", "tokens", "Sum over requests of the distance between the two."
)
FLEET_HANDOFFS = counter("baton_fleet_handoffs_total", "requests", "KV handed over, streamed or offered.", "handoff")
FLEET_KV_WAIT = seconds("baton_fleet_kv_wait_seconds", "From the first ask for KV to its first grant.", "handoff")
FLEET_KV_READ = seconds("baton_fleet_kv_read_seconds", "Time a request's KV was being read.", "handoff")
FLEET_RECOMPUTED = counter(
    "baton_fleet_recomputed_tokens_total", "tokens", "Prompt tokens that decode workers computed after a handoff."
)
FLEET_REPREFILLED = counter(
    "baton_fleet_reprefilled_tokens_total", "tokens", "Tokens computed again after preemptions."
)
FLEET_READBACK = counter(
    "baton_fleet_readback_tokens_total", "tokens", "Prompt tokens fetched by the worker that computed the rest."
)

# Processes (exposed by the metrics collector, from what each says of itself).
SERVICE_PHASE = gauge(
    "baton_service_phase", "1", "1 for the phase that a process is in.", "service", "process", "phase"
)

# Bus (/metrics of each process that has one).
BUS_DROPPED = counter("baton_bus_dropped_messages_total", "messages", "Messages lost because a subscriber was slow.")
BUS_BAD = counter(
    "baton_bus_bad_messages_total",
    "messages",
    "Messages that could not be unpacked, or spoke for others than their subject.",
)
BUS_PARTS_LOST = counter("baton_bus_incomplete_messages_total", "messages", "Messages of which a part never came.")
BUS_RECONNECTS = counter("baton_bus_reconnects_total", "reconnections", "Times the connection to NATS came back.")
