"""The fleet: its workers, their load, the planner's wishes, and lost messages."""

from __future__ import annotations

from observability.grafana.panels import MINUTES, Panel, gauge, graph, increase, rate, share, stat
from shared.telemetry import names

WORKER = "{{worker_id}} ({{role}})"
BY_WORKER = "worker_id, role"
FULL, NEARLY_FULL = 0.95, 0.85

AT_A_LOOK = (
    stat(
        "Ready workers",
        gauge(names.FLEET_WORKERS, where='phase="ready"'),
        "Workers that take requests, of all roles. Good: as many as you started.",
    ),
    stat(
        "Lost in an hour",
        increase(names.FLEET_WORKERS_LOST),
        "Workers that fell silent or were started anew. Good: 0. `baton workers` shows which.",
        bad=1,
    ),
    stat("Requests/s", gauge(names.FLEET_REQUEST_RATE), "Requests that ended, mean of 10 s.", "reqps"),
    stat("Prompt tokens/s", gauge(names.FLEET_TOKENS_IN), "Of requests that ended, cached or not, mean of 10 s."),
    stat("Completion tokens/s", gauge(names.FLEET_TOKENS_OUT), "Of requests that ended, mean of 10 s."),
    stat(
        "Leader's term",
        f"max ({names.FLEET_TERM.name})",
        "How often the lead changed hands. Good: it stays as it is; a step is an orchestrator that was replaced.",
    ),
)

WORKERS = (
    graph(
        "Workers by phase",
        "short",
        {"{{role}} {{phase}}": gauge(names.FLEET_WORKERS, "role, phase")},
        "Good: ready. Probing for long: its canaries fail, and `baton workers` says why.",
    ),
    graph(
        "Phase of each worker",
        "short",
        {WORKER + " {{phase}}": gauge(names.WORKER_PHASE, "worker_id, role, phase")},
        "1 for the phase that a worker is in: starting, probing, ready, draining.",
    ),
    Panel(
        title="Silence",
        unit="s",
        queries={WORKER: gauge(names.WORKER_SILENCE, BY_WORKER)},
        meaning="Since the orchestrator last heard of it. Good: about a second. Silent for longer: lost.",
        warn=3,
    ),
    graph(
        "Running",
        "short",
        {WORKER: gauge(names.WORKER_RUNNING, BY_WORKER)},
        "Requests in the engine's batch. Good: alike among workers of a role.",
    ),
    graph(
        "Waiting",
        "short",
        {WORKER: gauge(names.WORKER_WAITING, BY_WORKER)},
        "Requests in the engine's own queue. Good: about 0, since routers keep back what an engine cannot begin soon.",
    ),
    graph(
        "Waiting prompt tokens",
        "short",
        {WORKER: gauge(names.WORKER_WAITING_TOKENS, BY_WORKER)},
        "Accepted and not yet computed: divided by the prefill speed, the seconds that a new prompt would wait.",
    ),
)

USE = (
    Panel(
        title="Time in steps",
        unit="percentunit",
        queries={WORKER: rate(names.WORKER_STEP_SECONDS, BY_WORKER)},
        meaning="Utilization: the part of its time that an engine computes. Near 100%: this role is short.",
        warn=FULL,
    ),
    Panel(
        title="KV blocks in use",
        unit="percentunit",
        queries={WORKER: gauge(names.WORKER_KV_USED, BY_WORKER)},
        meaning="Saturation: near 100% requests queue or are thrown out of the batch. Of a store, full is usual.",
        warn=NEARLY_FULL,
        bad=FULL,
    ),
    Panel(
        title="Legs, of those it may serve",
        unit="percentunit",
        queries={WORKER: share(gauge(names.WORKER_LEGS, BY_WORKER), gauge(names.WORKER_LEGS_MAX, BY_WORKER))},
        meaning="Saturation: at 100% routers keep requests back. Workers that have no such limit are not shown.",
        warn=NEARLY_FULL,
    ),
    graph(
        "Legs",
        "short",
        {WORKER: gauge(names.WORKER_LEGS, BY_WORKER)},
        "Parts of requests that a worker serves now.",
    ),
    graph(
        "Failed requests by worker",
        "reqps",
        {WORKER + " {{reason}}": rate(names.WORKER_FAILURES, "worker_id, role, reason")},
        "Failed requests by the worker that was to generate them. Good: only requests that clients cancelled.",
    ),
    graph(
        "Preemptions",
        "short",
        {WORKER: rate(names.WORKER_PREEMPTIONS, BY_WORKER)},
        "Requests/s thrown out of the batch for lack of KV. Good: 0. Else: fewer sequences, or more workers.",
    ),
    graph(
        "Tokens generated",
        "short",
        {WORKER: rate(names.WORKER_GENERATION_TOKENS, BY_WORKER)},
        "Per second. Alike among workers of a role where they are of like hardware.",
    ),
    graph(
        "Prefill speed (tokens/s)",
        "short",
        {WORKER: gauge(names.WORKER_PREFILL_SPEED, BY_WORKER)},
        "As measured lately; 0 before the first prompt.",
    ),
    graph(
        "Time between tokens",
        "s",
        {WORKER: gauge(names.WORKER_TOKEN_INTERVAL, BY_WORKER)},
        "Of one stream, lately. Rises with the batch and with prompts that are computed beside it.",
    ),
)

SERVICES = (
    graph(
        "Workers wanted by the planner",
        "short",
        {"{{model}} {{role}}": gauge(names.PLANNER_WANTED, "model, role")},
        "Good: as many as are ready. `baton plan` has the reasons.",
    ),
    Panel(
        title="Load by role",
        unit="percentunit",
        queries={"{{model}} {{role}}": gauge(names.PLANNER_LOAD, "model, role")},
        meaning="Work over what the role's workers can do. Over 100% queues grow.",
        warn=0.9,
        bad=1.0,
    ),
    graph(
        "Planner's changes",
        "short",
        {"{{action}} {{role}}": rate(names.PLANNER_CHANGES, "action, role", window=MINUTES)},
        "Per second. Good: rare; one that undoes another is a planner that is not steady.",
    ),
    graph(
        "Processes",
        "short",
        {"{{service}} {{phase}}": gauge(names.SERVICE_PHASE, "service, phase")},
        "All of Baton's, as each says of itself. Good: ready.",
    ),
    graph(
        "Messages dropped",
        "short",
        {"{{instance}}": rate(names.BUS_DROPPED, "instance")},
        "Per second. Good: 0. A process that drops messages cannot keep up with them: it needs more CPU.",
    ),
    graph(
        "Reconnections to NATS",
        "short",
        {"{{instance}}": rate(names.BUS_RECONNECTS, "instance")},
        "Per second. Good: 0.",
    ),
)

FLEET = (*AT_A_LOOK, *WORKERS, *USE, *SERVICES)
