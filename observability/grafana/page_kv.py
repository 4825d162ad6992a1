"""KV exchange dashboard: sources of KV, cost of transfers, recomputation, leases and stores."""

from __future__ import annotations

from observability.grafana.page_fleet import BY_WORKER, FULL, WORKER
from observability.grafana.panels import Panel, gauge, graph, increase, quantiles, rate, share
from shared.telemetry import names

STORE = "{{worker_id}}"
BY_TIER, BY_KIND = "worker_id, tier", "worker_id, kind, outcome"
DECODING = 'role="decode"'

PROMPTS = (
    graph(
        "Prompt tokens/s by source of their KV",
        "short",
        {"{{source}}": rate(names.FLEET_PROMPT_TOKENS, "source")},
        "computed, cached or received from another worker. Good: few computed in multi-turn conversations.",
    ),
    graph(
        "Prompt tokens/s by worker and source",
        "short",
        {WORKER + " {{source}}": rate(names.WORKER_PROMPT_TOKENS, "worker_id, role, source")},
        "Good: prefill workers compute, decode workers receive.",
    ),
    Panel(
        title="Prompt tokens computed per request on decode workers",
        unit="short",
        queries={
            WORKER: share(
                rate(names.WORKER_PROMPT_TOKENS, BY_WORKER, f'{DECODING},source="computed"'),
                rate(names.WORKER_REQUESTS, BY_WORKER, DECODING),
            )
        },
        meaning="Good: less than one block (the tail). More: handoffs fail, or the worker serves aggregated requests.",
        warn=64,
    ),
    graph(
        "Handoffs/s",
        "reqps",
        {"{{handoff}}": rate(names.FLEET_HANDOFFS, "handoff")},
        "streamed: while the prompt is computed. offered: after the prompt is computed.",
    ),
    graph(
        "Waiting for KV",
        "s",
        quantiles(names.FLEET_KV_WAIT, "handoff"),
        "Time from the first lease request to the first grant. If streamed, it includes computing the first chunk.",
    ),
    graph(
        "Reading KV",
        "s",
        quantiles(names.FLEET_KV_READ, "handoff"),
        "Time that KV reads of a request take. Good: small compared with TTFT.",
    ),
    graph(
        "Prompt tokens/s recomputed",
        "short",
        {
            WORKER + " silent re-prefill": rate(names.WORKER_RECOMPUTED, BY_WORKER),
            "decode workers, tails included": rate(names.FLEET_RECOMPUTED),
            "after preemptions": rate(names.FLEET_REPREFILLED),
        },
        "Good: no silent re-prefill. Responses stay correct, but the prompt tokens are computed twice.",
    ),
    graph(
        "Tokens/s read back",
        "short",
        {"read back": rate(names.FLEET_READBACK)},
        "Earlier turns that prefill workers fetched from other workers because fetching is faster than computing.",
    ),
    graph(
        "Requests/s below their cache hit threshold",
        "reqps",
        {WORKER: rate(names.WORKER_REFUSED, BY_WORKER)},
        "The worker refuses them and the router tries another worker. Good: few; each costs a round trip.",
    ),
)

MOVING = (
    graph(
        "KV received", "Bps", {WORKER: rate(names.WORKER_RECEIVED_BYTES, BY_WORKER)}, "Bytes/s read from other workers."
    ),
    graph(
        "Bandwidth while receiving",
        "Bps",
        {WORKER: share(rate(names.WORKER_RECEIVED_BYTES, BY_WORKER), rate(names.WORKER_RECEIVED_SECONDS, BY_WORKER))},
        "Bytes divided by the time during which reads ran. Good: near the bandwidth of the network.",
    ),
    graph(
        "Bandwidth in KV self-tests",
        "Bps",
        {"{{worker_id}} from {{source}} ({{memory}})": gauge(names.WORKER_KV_READ_SPEED, "worker_id, source, memory")},
        "Each pair of workers, when the younger one started. cuda below 5 GB/s: TCP, or copies through host memory.",
    ),
    graph(
        "KV received in 1 h",
        "bytes",
        {"received": increase(names.FLEET_RECEIVED_BYTES)},
        "All workers, including those that have left.",
    ),
    graph(
        "Leases held",
        "short",
        {WORKER: gauge(names.WORKER_LEASES_HELD, BY_WORKER)},
        "Current leases on a worker's blocks. Good: 0 within seconds after the last request.",
    ),
    graph(
        "Blocks pinned by leases",
        "short",
        {WORKER: gauge(names.WORKER_PINNED, BY_WORKER)},
        "Blocks that the engine cannot reuse until their leases end. Good: 0 when there are no leases.",
    ),
    graph(
        "Leases/s by outcome",
        "short",
        {"{{outcome}}": rate(names.WORKER_LEASES, "outcome")},
        "Good: as many released as granted. expired: readers crashed or are slow. refused: too many blocks are pinned.",
    ),
    graph(
        "Reads in progress",
        "short",
        {WORKER: gauge(names.WORKER_READS_RUNNING, BY_WORKER)},
        "Current KV reads from other workers.",
    ),
    graph(
        "Reads/s by outcome",
        "short",
        {WORKER + " {{outcome}}": rate(names.WORKER_READS, "worker_id, role, outcome")},
        "Good: none failed. Tokens of failed reads are computed.",
    ),
)

STORES = (
    graph("Blocks in stores", "short", {STORE + " {{tier}}": gauge(names.STORE_BLOCKS, BY_TIER)}, "Blocks by tier."),
    graph("KV in stores", "bytes", {STORE + " {{tier}}": gauge(names.STORE_BYTES, BY_TIER)}, "Bytes by tier."),
    Panel(
        title="Store utilization",
        unit="percentunit",
        queries={
            STORE + " {{tier}}": share(gauge(names.STORE_BLOCKS, BY_TIER), gauge(names.STORE_BLOCKS_MAX, BY_TIER))
        },
        meaning="100% is normal. If the store also evicts many blocks, a larger store would avoid more recomputation.",
        warn=FULL,
    ),
    graph(
        "KV received and sent by stores",
        "Bps",
        {
            STORE + " received": rate(names.WORKER_RECEIVED_BYTES, "worker_id", 'role="store"'),
            STORE + " sent": rate(names.STORE_GRANTED, "worker_id"),
        },
        "Good: more sent than received. Otherwise the store is not worth its memory.",
    ),
    graph(
        "Blocks/s loaded and saved by stores",
        "short",
        {STORE + " {{kind}} {{outcome}}": rate(names.STORE_MOVED, BY_KIND)},
        "Loaded from files and saved to files. Good: all done.",
    ),
    graph(
        "Blocks waiting to be loaded or saved by stores",
        "short",
        {STORE + " {{kind}}": gauge(names.STORE_WAITING, "worker_id, kind")},
        "Good: near 0. Otherwise the disk is too slow.",
    ),
    graph(
        "Blocks/s evicted by stores",
        "short",
        {STORE + " {{tier}}": rate(names.STORE_EVICTED, BY_TIER)},
        "Blocks evicted from tier host may still be in files; blocks evicted from tier disk are lost.",
    ),
    Panel(
        title="Blocks lost by stores in 1 h",
        unit="short",
        queries={STORE + " {{kind}} {{outcome}}": increase(names.STORE_MOVED, BY_KIND, 'outcome!="done"')},
        meaning="Good: 0. Blocks are damaged or not saved: the disk is full or corrupts data.",
        bad=1,
    ),
    graph(
        "Free disk space of stores",
        "bytes",
        {STORE: gauge(names.STORE_DISK_FREE, "worker_id")},
        "Free space on the file system of the store's files. Stores without files are not shown.",
    ),
)

KV_EXCHANGE = (*PROMPTS, *MOVING, *STORES)
