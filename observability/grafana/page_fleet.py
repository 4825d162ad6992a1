"""Fleet dashboard: workers and their load, the planner, and the health of Baton's processes."""

from __future__ import annotations

from observability.grafana.panels import MINUTES, Panel, gauge, graph, increase, rate, share, stat
from shared.telemetry import names

WORKER = "{{worker_id}} ({{role}})"
BY_WORKER = "worker_id, role"
FULL, NEARLY_FULL = 0.95, 0.85

OVERVIEW = (
    stat(
        "Ready workers",
        gauge(names.FLEET_WORKERS, where='phase="ready"'),
        "Ready workers of all roles. Good: the number that you started.",
    ),
    stat(
        "Workers lost in 1 h",
        increase(names.FLEET_WORKERS_LOST),
        "Workers that went silent or restarted. Good: 0. `baton workers` shows which.",
        bad=1,
    ),
    stat("Requests/s", gauge(names.FLEET_REQUEST_RATE), "Finished requests, 10 s mean.", "reqps"),
    stat(
        "Prompt tokens/s", gauge(names.FLEET_TOKENS_IN), "Prompt tokens of finished requests, cached or not, 10 s mean."
    ),
    stat("Completion tokens/s", gauge(names.FLEET_TOKENS_OUT), "Completion tokens of finished requests, 10 s mean."),
    stat(
        "Leader's term",
        f"max ({names.FLEET_TERM.name})",
        "Leadership term of the orchestrator. Good: constant; each increase is a change of leader.",
    ),
)

WORKERS = (
    graph(
        "Workers by phase",
        "short",
        {"{{role}} {{phase}}": gauge(names.FLEET_WORKERS, "role, phase")},
        "Good: ready. A worker that stays in probing fails its KV self-test; `baton workers` shows why.",
    ),
    graph(
        "Phase of each worker",
        "short",
        {WORKER + " {{phase}}": gauge(names.WORKER_PHASE, "worker_id, role, phase")},
        "1 for the current phase: starting, probing, ready or draining.",
    ),
    Panel(
        title="Silence",
        unit="s",
        queries={WORKER: gauge(names.WORKER_SILENCE, BY_WORKER)},
        meaning="Time since the worker's last message. Good: about 1 s. After a longer silence it is declared lost.",
        warn=3,
    ),
    graph(
        "Running",
        "short",
        {WORKER: gauge(names.WORKER_RUNNING, BY_WORKER)},
        "Requests in the engine's batch. Good: similar for all workers of a role.",
    ),
    graph(
        "Waiting",
        "short",
        {WORKER: gauge(names.WORKER_WAITING, BY_WORKER)},
        "Requests in the engine's queue. Good: about 0, since routers queue requests that an engine cannot start soon.",
    ),
    graph(
        "Waiting prompt tokens",
        "short",
        {WORKER: gauge(names.WORKER_WAITING_TOKENS, BY_WORKER)},
        "Accepted but not yet computed. Divided by the prefill speed this is the wait of a new prompt in seconds.",
    ),
)

UTILIZATION = (
    Panel(
        title="Engine utilization",
        unit="percentunit",
        queries={WORKER: rate(names.WORKER_STEP_SECONDS, BY_WORKER)},
        meaning="Fraction of time that the engine spends in steps. Near 100%: the role needs more workers.",
        warn=FULL,
    ),
    Panel(
        title="KV blocks in use",
        unit="percentunit",
        queries={WORKER: gauge(names.WORKER_KV_USED, BY_WORKER)},
        meaning="Near 100% requests queue or are preempted. For a store 100% is normal.",
        warn=NEARLY_FULL,
        bad=FULL,
    ),
    Panel(
        title="Request legs, relative to the limit",
        unit="percentunit",
        queries={WORKER: share(gauge(names.WORKER_LEGS, BY_WORKER), gauge(names.WORKER_LEGS_MAX, BY_WORKER))},
        meaning="At 100% routers queue requests. Workers without a limit are not shown.",
        warn=NEARLY_FULL,
    ),
    graph(
        "Request legs",
        "short",
        {WORKER: gauge(names.WORKER_LEGS, BY_WORKER)},
        "Requests that a worker currently serves in part (prefill or decode) or as a whole.",
    ),
    graph(
        "Failed requests by worker",
        "reqps",
        {WORKER + " {{reason}}": rate(names.WORKER_FAILURES, "worker_id, role, reason")},
        "Failed requests by the worker that was to decode them. Good: only requests that clients cancelled.",
    ),
    graph(
        "Preemptions",
        "short",
        {WORKER: rate(names.WORKER_PREEMPTIONS, BY_WORKER)},
        "Requests/s preempted for lack of KV blocks. Good: 0. Otherwise reduce max_num_seqs or add workers.",
    ),
    graph(
        "Tokens generated/s",
        "short",
        {WORKER: rate(names.WORKER_GENERATION_TOKENS, BY_WORKER)},
        "Good: similar for workers of a role with equal hardware.",
    ),
    graph(
        "Prefill speed (tokens/s)",
        "short",
        {WORKER: gauge(names.WORKER_PREFILL_SPEED, BY_WORKER)},
        "Recent measurement; 0 before the first prompt.",
    ),
    graph(
        "Time between tokens",
        "s",
        {WORKER: gauge(names.WORKER_TOKEN_INTERVAL, BY_WORKER)},
        "Recent measurement for one stream. Grows with the batch and with prompts computed in the same steps.",
    ),
)

SERVICES = (
    graph(
        "Workers targeted by the planner",
        "short",
        {"{{model}} {{role}}": gauge(names.PLANNER_WANTED, "model, role")},
        "Good: equal to the number of ready workers. `baton plan` shows the reasons.",
    ),
    Panel(
        title="Load by role",
        unit="percentunit",
        queries={"{{model}} {{role}}": gauge(names.PLANNER_LOAD, "model, role")},
        meaning="Demand divided by the capacity of the role's workers. Above 100% queues grow.",
        warn=0.9,
        bad=1.0,
    ),
    graph(
        "Planner changes/s",
        "short",
        {"{{action}} {{role}}": rate(names.PLANNER_CHANGES, "action, role", window=MINUTES)},
        "Good: rare. Changes that undo each other mean that the planner oscillates.",
    ),
    graph(
        "Processes",
        "short",
        {"{{service}} {{phase}}": gauge(names.SERVICE_PHASE, "service, phase")},
        "Baton's processes by the phase that they report. Good: ready.",
    ),
    graph(
        "Messages dropped/s",
        "short",
        {"{{instance}}": rate(names.BUS_DROPPED, "instance")},
        "Good: 0. A process drops messages when it is too slow; give it more CPU.",
    ),
    graph("Reconnections to NATS/s", "short", {"{{instance}}": rate(names.BUS_RECONNECTS, "instance")}, "Good: 0."),
    graph(
        "Free disk space",
        "bytes",
        {"{{service}} {{process}} {{folder}}": gauge(names.DISK_FREE, "service, process, folder")},
        "On a full disk NATS cannot write the worker registry, and logs are lost.",
    ),
)

FLEET = (*OVERVIEW, *WORKERS, *UTILIZATION, *SERVICES)
