"""All metrics. Tests check dashboards, alerts and code against this file. Spans are in ``span_names``."""

from __future__ import annotations

from shared.telemetry.metrics import LISTED, Kind, Metric, counter, gauge, listed, seconds, token_seconds

METRICS = LISTED

OVERHEAD_BUCKETS_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1)

# Router (/metrics of each router process).
ROUTER_REQUESTS = counter(
    "baton_router_requests_total", "requests", "Finished requests by HTTP status.", "mode", "status"
)
ROUTER_IN_FLIGHT = gauge("baton_router_requests_in_flight", "requests", "Requests in progress.")
ROUTER_REFUSALS = counter("baton_router_refusals_total", "requests", "Failed or rejected requests by reason.", "reason")
ROUTER_RETRIES = counter("baton_router_retries_total", "legs", "Retried legs by reason.", "reason")
ROUTER_RESUMES = counter(
    "baton_router_resumes_total",
    "streams",
    "Streams that were resumed on another worker, by the reason of the interruption.",
    "reason",
)
ROUTER_QUARANTINED = counter(
    "baton_router_quarantined_total",
    "requests",
    "Requests refused for a while because an engine died while it computed them.",
)
ROUTER_UNREPORTED = counter(
    "baton_router_unreported_requests_total",
    "requests",
    "Finished requests that the metrics collector does not know, because NATS was away for too long.",
)
ROUTER_RESUME = seconds(
    "baton_router_resume_seconds", "Gap in the client's stream when it is resumed on another worker."
)
ROUTER_TTFT = seconds("baton_router_time_to_first_token_seconds", "Time from the request to the first token.", "mode")
ROUTER_ITL = token_seconds(
    "baton_router_inter_token_latency_seconds", "Time between consecutive events of a stream.", "mode"
)
ROUTER_TPOT = token_seconds(
    "baton_router_time_per_output_token_seconds", "Mean time between tokens after the first, per request.", "mode"
)
ROUTER_E2E = seconds("baton_router_request_seconds", "Time from the request to the last byte of the response.", "mode")
ROUTER_GOALS = counter(
    "baton_router_goals_total",
    "requests",
    "Finished requests by whether they met their latency targets. Goodput is goal=met.",
    "goal",
)
ROUTER_TRACES = counter(
    "baton_router_traces_total", "traces", "Traces by the reason for keeping or dropping them.", "why"
)
ROUTER_PLACEMENT = seconds(
    "baton_router_placement_seconds", "Time to choose the workers for a request.", buckets=OVERHEAD_BUCKETS_S
)
ROUTER_TTFT_PREDICTED = listed(
    Metric(
        name="baton_router_predicted_to_measured_ttft_ratio",
        kind=Kind.HISTOGRAM,
        unit="ratio",
        meaning="Predicted time from placement to first token divided by the measured time.",
        labels=("mode",),
        buckets=(0.1, 0.25, 0.5, 0.67, 0.8, 0.9, 1.0, 1.11, 1.25, 1.5, 2.0, 4.0, 10.0),
    )
)
ROUTER_ENGINE_SPEED = gauge(
    "baton_router_engine_speed_seconds",
    "seconds",
    "Estimated engine time per step, per token or per token pair, by parameter of the step-time model.",
    "worker_id",
    "parameter",
)
ROUTER_PROMPT_TOKENS = counter("baton_router_prompt_tokens_total", "tokens", "Prompt tokens of finished requests.")
ROUTER_COMPLETION_TOKENS = counter(
    "baton_router_completion_tokens_total", "tokens", "Completion tokens relayed to clients."
)
ROUTER_CACHED_PREDICTED = counter(
    "baton_router_cached_tokens_predicted_total", "tokens", "Prompt tokens that placement predicted to be cached."
)
ROUTER_CACHED_ACTUAL = counter(
    "baton_router_cached_tokens_actual_total", "tokens", "Prompt tokens that the engine found in its prefix cache."
)
ROUTER_PLACEMENTS = counter(
    "baton_router_placements_total",
    "requests",
    "Finished requests by mode and reason of their last placement.",
    "mode",
    "why",
)
ROUTER_QUEUE = gauge("baton_router_requests_waiting", "requests", "Requests in the admission queue.")
ROUTER_QUEUE_MAX = gauge("baton_router_requests_waiting_max", "requests", "Capacity of the admission queue.")
ROUTER_ADMISSION = seconds(
    "baton_router_admission_wait_seconds", "Time that queued requests spent in the admission queue."
)
ROUTER_TENANT_REQUESTS = counter(
    "baton_router_tenant_requests_total", "requests", "Finished requests by outcome.", "tenant", "outcome"
)
ROUTER_TENANT_TOKENS = counter(
    "baton_router_tenant_tokens_total", "tokens", "Prompt tokens computed and tokens generated.", "tenant", "kind"
)
ROUTER_INDEX_STATE = gauge(
    "baton_router_index_state", "1", "1 for the current state of a worker's prefix index.", "worker_id", "state"
)
ROUTER_INDEX_BLOCKS = gauge(
    "baton_router_index_blocks", "blocks", "Blocks of a worker in the prefix index.", "worker_id"
)
ROUTER_INDEX_COMPILED = gauge(
    "baton_router_index_compiled", "1", "1 when the compiled prefix index is used, 0 for the Python one."
)
ROUTER_TOKEN_PARITY = gauge(
    "baton_router_token_parity",
    "1",
    "1 for the current state: whether the router's tokens equal the worker's (agrees, differs or unknown).",
    "worker_id",
    "state",
)
ROUTER_RENDERED_PROMPTS = counter(
    "baton_router_rendered_prompts_total",
    "requests",
    "Requests by what came of asking a worker to render their prompt.",
    "outcome",
)
ROUTER_PREFETCHES = counter(
    "baton_router_prefetches_total",
    "requests",
    "Prompts whose KV a worker was to read before their requests came, by what came of that.",
    "outcome",
)
ROUTER_RESPONSES = counter(
    "baton_router_kept_responses_total",
    "responses",
    "Responses that were to be kept for their clients, by whether they are.",
    "outcome",
)
ROUTER_BATCH_LINES = counter(
    "baton_router_batch_lines_total", "lines", "Lines of batches whose result is stored, by outcome.", "outcome"
)
ROUTER_BATCHES = gauge("baton_router_batches", "batches", "Batches that this router runs now.")
ROUTER_SNAPSHOTS = counter(
    "baton_router_snapshots_total", "requests", "KV snapshots requested from new workers or after missed events."
)
ROUTER_ORPHANS = counter(
    "baton_router_orphaned_legs_total",
    "legs",
    "Legs known to one side only: to the worker (served) or to the router (awaited).",
    "kind",
)
ROUTER_PEERS = gauge("baton_router_peers", "routers", "Other routers that this router receives messages from.")

OF_WORKER = ("worker_id", "role")

# Workers (exposed by the metrics collector, from load reports).
WORKER_RUNNING = gauge("baton_worker_requests_running", "requests", "Requests in the engine's batch.", *OF_WORKER)
WORKER_WAITING = gauge("baton_worker_requests_waiting", "requests", "Requests in the engine's queue.", *OF_WORKER)
WORKER_WAITING_TOKENS = gauge(
    "baton_worker_waiting_tokens", "tokens", "Prompt tokens accepted but not yet computed.", *OF_WORKER
)
WORKER_LEGS = gauge("baton_worker_legs", "legs", "Legs in progress.", *OF_WORKER)
WORKER_LEGS_MAX = gauge("baton_worker_legs_max", "legs", "Maximum number of concurrent legs.", *OF_WORKER)
WORKER_STEP_SECONDS = counter(
    "baton_worker_step_seconds_total", "seconds", "Time that the engine spent in steps; 0 while idle.", *OF_WORKER
)
WORKER_KV_USED = gauge("baton_worker_kv_used_ratio", "ratio", "Fraction of KV blocks in use, 0 to 1.", *OF_WORKER)
WORKER_PROMPT_TOKENS = counter(
    "baton_worker_prompt_tokens_total",
    "tokens",
    "Prompt tokens by the source of their KV: computed, cached or received.",
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
WORKER_KV_READ_SPEED = gauge(
    "baton_worker_kv_read_bytes_per_second",
    "bytes/s",
    "Speed at which the worker read KV blocks of another worker (source) in their newest KV self-test.",
    *OF_WORKER,
    "source",
    "memory",
)
WORKER_PREEMPTIONS = counter(
    "baton_worker_preemptions_total", "requests", "Requests preempted for lack of KV blocks.", *OF_WORKER
)
WORKER_PREFILL_SPEED = gauge("baton_worker_prefill_tokens_per_second", "tokens/s", "Recent prefill speed.", *OF_WORKER)
WORKER_TOKEN_INTERVAL = gauge(
    "baton_worker_token_interval_seconds", "seconds", "Recent time between tokens of a stream.", *OF_WORKER
)
WORKER_TOKENS_IN = gauge(
    "baton_worker_tokens_in_per_second", "tokens/s", "Prompt tokens computed, 10 s mean.", *OF_WORKER
)
WORKER_TOKENS_OUT = gauge("baton_worker_tokens_out_per_second", "tokens/s", "Tokens generated, 10 s mean.", *OF_WORKER)
WORKER_REQUESTS = counter(
    "baton_worker_requests_total", "requests", "Finished requests that this worker decoded.", *OF_WORKER, "mode"
)
WORKER_FAILURES = counter(
    "baton_worker_failures_total",
    "requests",
    "Failed requests that this worker was to decode, by reason.",
    *OF_WORKER,
    "reason",
)
WORKER_TTFT = seconds(
    "baton_worker_time_to_first_token_seconds", "TTFT of the requests that this worker decoded.", *OF_WORKER
)
WORKER_ITL = token_seconds(
    "baton_worker_inter_token_latency_seconds", "Mean ITL of each request that this worker decoded.", *OF_WORKER
)
WORKER_E2E = seconds("baton_worker_request_seconds", "Duration of the requests that this worker decoded.", *OF_WORKER)
WORKER_CACHED_MISSED = counter(
    "baton_worker_cached_tokens_missed_total",
    "tokens",
    "Absolute error of the predicted cached tokens, summed over the prompts that this worker computed.",
    *OF_WORKER,
)
WORKER_INFO = gauge(
    "baton_worker_info",
    "workers",
    "1; other metrics of the worker join it to be grouped by model.",
    "worker_id",
    "role",
    "model",
)
WORKER_PHASE = gauge("baton_worker_phase", "1", "1 for the current phase of the worker.", *OF_WORKER, "phase")
WORKER_SILENCE = gauge(
    "baton_worker_silence_seconds", "seconds", "Time since the last message from the worker.", *OF_WORKER
)

# KV exchange (exposed by the metrics collector, from load reports; only workers with Baton's connector send them).
WORKER_LEASES_HELD = gauge(
    "baton_worker_kv_leases_held", "leases", "Current leases on this worker's blocks.", *OF_WORKER
)
WORKER_PINNED = gauge("baton_worker_kv_pinned_blocks", "blocks", "Blocks currently pinned by leases.", *OF_WORKER)
WORKER_READS_RUNNING = gauge(
    "baton_worker_kv_reads_running", "reads", "Reads from other workers in progress.", *OF_WORKER
)
WORKER_LEASES = counter(
    "baton_worker_kv_leases_total", "leases", "Leases granted, refused, released or expired.", *OF_WORKER, "outcome"
)
WORKER_READS = counter("baton_worker_kv_reads_total", "reads", "Finished reads: done or failed.", *OF_WORKER, "outcome")
WORKER_REFUSED = counter(
    "baton_worker_cache_refusals_total",
    "requests",
    "Requests refused because their cache hit threshold was not met.",
    *OF_WORKER,
)
WORKER_RECOMPUTED = counter(
    "baton_worker_recomputed_tokens_total",
    "tokens",
    "Prompt tokens that decode legs computed again beyond the last partial block.",
    *OF_WORKER,
)
WORKER_RECOMPUTE_SLOWED = counter(
    "baton_worker_recompute_slowed_seconds_total",
    "seconds",
    "Time in which recomputes got less of the engine's steps than they could use, to spare ready requests.",
    *OF_WORKER,
)
WORKER_FIRST_TOKENS = counter(
    "baton_worker_first_tokens_received_total",
    "tokens",
    "Answers that began with the token of their prefill leg, and not with one that this worker sampled.",
    *OF_WORKER,
)
WORKER_STORE_COPIES = counter(
    "baton_worker_store_copies_total",
    "blocks",
    "Blocks of recently used prefixes that a store copied, or that the engine evicted before (copied, lost).",
    *OF_WORKER,
    "outcome",
)

WORKER_PREFETCHED = counter(
    "baton_worker_prefetched_blocks_total",
    "blocks",
    "Prefetched blocks (fetched), those that a request found later (used), and those that none did before they were "
    "evicted, or within ten minutes (wasted).",
    *OF_WORKER,
    "outcome",
)

# Stores (exposed by the metrics collector, from load reports). Tier host is memory, disk is files, object a bucket.
STORE_BLOCKS = gauge("baton_store_blocks", "blocks", "Blocks held by the store.", "worker_id", "tier")
STORE_BLOCKS_MAX = gauge("baton_store_blocks_max", "blocks", "Capacity of the store.", "worker_id", "tier")
STORE_BYTES = gauge("baton_store_bytes", "bytes", "KV bytes held by the store.", "worker_id", "tier")
STORE_DISK_FREE = gauge(
    "baton_store_disk_free_bytes", "bytes", "Free space on the file system of the store's files.", "worker_id"
)
STORE_WAITING = gauge(
    "baton_store_blocks_waiting",
    "blocks",
    "Blocks waiting to be loaded from disk or bucket, or saved there.",
    "worker_id",
    "kind",
)
STORE_MOVED = counter(
    "baton_store_moved_blocks_total",
    "blocks",
    "Blocks loaded from disk or bucket (done or damaged) and saved there (done or failed).",
    "worker_id",
    "kind",
    "outcome",
)
STORE_EVICTED = counter("baton_store_evicted_blocks_total", "blocks", "Evicted blocks.", "worker_id", "tier")
STORE_GRANTED = counter(
    "baton_store_granted_bytes_total",
    "bytes",
    "KV bytes granted to readers. Bytes that the store receives: baton_worker_kv_received_bytes_total.",
    "worker_id",
)

# Fleet (exposed by the metrics collector). Totals include workers that have left.
FLEET_WORKERS = gauge("baton_fleet_workers", "workers", "Workers by model, role and phase.", "model", "role", "phase")
FLEET_WORKERS_LOST = counter("baton_fleet_workers_lost_total", "workers", "Workers declared lost.")
FLEET_TERM = gauge(
    "baton_fleet_term", "terms", "Leadership term of the orchestrator; grows with each change of leader."
)
PLANNER_WANTED = gauge(
    "baton_planner_workers_wanted", "workers", "Number of workers that the planner wants.", "model", "role"
)
PLANNER_LOAD = gauge(
    "baton_planner_load_ratio", "ratio", "Demand divided by the capacity of the workers.", "model", "role"
)
PLANNER_CHANGES = counter(
    "baton_planner_changes_total", "changes", "Changes that the planner decided.", "action", "role"
)
FLEET_REQUESTS = counter(
    "baton_fleet_requests_total", "requests", "Finished requests by HTTP status.", "model", "mode", "status"
)
FLEET_FAILURES = counter("baton_fleet_failures_total", "requests", "Failed requests by reason.", "model", "reason")
FLEET_REQUEST_RATE = gauge("baton_fleet_requests_per_second", "requests/s", "Finished requests, 10 s mean.")
FLEET_TOKENS_IN = gauge(
    "baton_fleet_tokens_in_per_second", "tokens/s", "Prompt tokens of finished requests, 10 s mean."
)
FLEET_TOKENS_OUT = gauge(
    "baton_fleet_tokens_out_per_second", "tokens/s", "Completion tokens of finished requests, 10 s mean."
)
FLEET_REQUEST_TOKENS = counter(
    "baton_fleet_request_tokens_total", "tokens", "Prompt and completion tokens of finished requests.", "model", "kind"
)
FLEET_PROMPT_TOKENS = counter(
    "baton_fleet_prompt_tokens_total", "tokens", "Sum of baton_worker_prompt_tokens_total over all workers.", "source"
)
FLEET_GENERATION_TOKENS = counter("baton_fleet_generation_tokens_total", "tokens", "Tokens generated by all workers.")
FLEET_RECEIVED_BYTES = counter("baton_fleet_kv_received_bytes_total", "bytes", "KV bytes read by all workers.")
FLEET_TTFT = seconds(
    "baton_fleet_time_to_first_token_seconds", "Time from the request to the first token.", "model", "mode"
)
FLEET_ITL = token_seconds(
    "baton_fleet_inter_token_latency_seconds", "Mean time between tokens after the first, per request.", "model", "mode"
)
FLEET_E2E = seconds(
    "baton_fleet_request_seconds", "Time from the request to the last byte of the response.", "model", "mode"
)
FLEET_CACHED_PREDICTED = counter(
    "baton_fleet_cached_tokens_predicted_total",
    "tokens",
    "Predicted cached tokens of requests whose actual number is known.",
)
FLEET_CACHED_ACTUAL = counter(
    "baton_fleet_cached_tokens_actual_total", "tokens", "Actual cached tokens of requests with a prediction."
)
FLEET_CACHED_MISSED = counter(
    "baton_fleet_cached_tokens_missed_total",
    "tokens",
    "Absolute error of the predicted cached tokens, summed over requests.",
)
FLEET_HANDOFFS = counter(
    "baton_fleet_handoffs_total", "requests", "KV handoffs by kind: streamed or offered.", "handoff"
)
FLEET_KV_WAIT = seconds(
    "baton_fleet_kv_wait_seconds", "Time from the first lease request to its first grant.", "handoff"
)
FLEET_KV_READ = seconds("baton_fleet_kv_read_seconds", "Time that KV reads of a request took.", "handoff")
FLEET_DRAFTS = counter(
    "baton_fleet_draft_tokens_total",
    "tokens",
    "Tokens that drafters proposed (speculative decoding), accepted or rejected, by the handoff before: streamed, "
    "offered or none. Fewer accepted after handoffs than without: the draft's KV did not arrive.",
    "handoff",
    "result",
)
FLEET_RECOMPUTED = counter(
    "baton_fleet_recomputed_tokens_total", "tokens", "Prompt tokens that decode workers computed again after a handoff."
)
FLEET_REPREFILLED = counter(
    "baton_fleet_reprefilled_tokens_total", "tokens", "Tokens computed again after preemptions."
)
FLEET_READBACK = counter(
    "baton_fleet_readback_tokens_total", "tokens", "Prompt tokens that prefill workers fetched from other workers."
)

# Usage of this month, in UTC (exposed by the metrics collector, from the usage ledger): the 50 keys and models with the
# most tokens. `baton usage` has all of it.
OF_USAGE = ("tenant", "key", "model")
USAGE_TOKENS = gauge(
    "baton_usage_month_tokens",
    "tokens",
    "Tokens of this month in the usage ledger: prompt, those of it that were cached, and completion.",
    *OF_USAGE,
    "kind",
)
USAGE_REQUESTS = gauge(
    "baton_usage_month_requests", "requests", "Requests of this month in the usage ledger.", *OF_USAGE
)
USAGE_ENGINE_SECONDS = gauge(
    "baton_usage_month_engine_seconds", "seconds", "Estimated engine time of this month in the usage ledger.", *OF_USAGE
)
USAGE_BUDGET = gauge(
    "baton_usage_budget_used_ratio", "ratio", "Share of its monthly budget that an API key has used.", "tenant", "key"
)

# vLLM's own names, for tools that read vLLM's metrics (exposed by the metrics collector).
OF_VLLM = ("model_name", "engine", "worker_id", "role")
VLLM_RUNNING = gauge("vllm:num_requests_running", "requests", "Requests in the engine's batch.", *OF_VLLM)
VLLM_WAITING = gauge("vllm:num_requests_waiting", "requests", "Requests in the engine's queue.", *OF_VLLM)
VLLM_KV_USED = gauge("vllm:kv_cache_usage_perc", "1", "Fraction of KV blocks in use, 0 to 1.", *OF_VLLM)
VLLM_CACHE_CONFIG = gauge(
    "vllm:cache_config_info",
    "1",
    "1; the labels are the sizes of the engine's KV cache.",
    *OF_VLLM,
    "block_size",
    "num_gpu_blocks",
    "kv_cache_size_tokens",
    "enable_prefix_caching",
)
VLLM_LORA_REQUESTS = gauge(
    "vllm:lora_requests_info",
    "unix time",
    "When the worker last reported, in Unix time; the labels name the LoRA adapters of its requests.",
    *OF_VLLM,
    "max_lora",
    "running_lora_adapters",
    "waiting_lora_adapters",
)

# Processes (exposed by the metrics collector, from service status messages).
SERVICE_PHASE = gauge(
    "baton_service_phase", "1", "1 for the current phase of a process.", "service", "process", "phase"
)
DISK_FREE = gauge(
    "baton_disk_free_bytes",
    "bytes",
    "Free space of the file system of a folder: state, logs, nats (JetStream's store) or kv_store.",
    "service",
    "process",
    "folder",
)
DISK_SIZE = gauge("baton_disk_size_bytes", "bytes", "Size of that file system.", "service", "process", "folder")
OF_PROCESS = ("service", "process")
PROCESS_MEMORY = gauge(
    "baton_process_resident_memory_bytes", "bytes", "Resident memory of the process, without its children.", *OF_PROCESS
)
PROCESS_CPU = counter("baton_process_cpu_seconds_total", "seconds", "CPU time of the process.", *OF_PROCESS)
PROCESS_OPEN_FDS = gauge("baton_process_open_fds", "descriptors", "Open file descriptors.", *OF_PROCESS)
PROCESS_MAX_FDS = gauge("baton_process_max_fds", "descriptors", "Limit of open file descriptors; 0: none.", *OF_PROCESS)
PROCESS_LOOP_LAG = gauge(
    "baton_process_event_loop_lag_seconds", "seconds", "Longest delay of the event loop in 15 to 30 s.", *OF_PROCESS
)
PROCESS_REFUSED = counter(
    "baton_process_refused_connections_total",
    "connections",
    "Connections of clients for which almost no file descriptor was left: refused, or an idle one made room.",
    *OF_PROCESS,
)

# Bus (/metrics of each process that serves it).
BUS_DROPPED = counter(
    "baton_bus_dropped_messages_total", "messages", "Messages dropped because a subscriber was too slow."
)
BUS_BAD = counter(
    "baton_bus_bad_messages_total",
    "messages",
    "Messages that could not be decoded or whose sender did not match the subject.",
)
BUS_PARTS_LOST = counter("baton_bus_incomplete_messages_total", "messages", "Multi-part messages with a missing part.")
BUS_RECONNECTS = counter("baton_bus_reconnects_total", "reconnections", "Reconnections to NATS.")
BUS_CERTIFICATE_EXPIRES = gauge(
    "baton_bus_certificate_expires_timestamp_seconds",
    "seconds",
    "When the certificate of NATS expires, in Unix time; 0 without TLS.",
)
