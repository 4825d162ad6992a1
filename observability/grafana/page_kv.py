"""Where prompts' KV comes from, what moving it costs, and whether anything is computed twice."""

from __future__ import annotations

from observability.grafana.page_fleet import BY_WORKER, FULL, WORKER
from observability.grafana.panels import Panel, gauge, graph, increase, quantiles, rate, share
from shared.telemetry import names

STORE = "{{worker_id}}"
BY_TIER, BY_KIND = "worker_id, tier", "worker_id, kind, outcome"
DECODING = 'role="decode"'

PROMPTS = (
    graph(
        "Where prompts' KV came from (tokens/s)",
        "short",
        {"{{source}}": rate(names.FLEET_PROMPT_TOKENS, "source")},
        "computed, cached or received from another worker. Good: little computed for conversations that go on.",
    ),
    graph(
        "By worker",
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
        meaning="Good: less than a block, the tail. More: no handoff, or whole requests are served there.",
        warn=64,
    ),
    graph(
        "Handoffs/s",
        "reqps",
        {"{{handoff}}": rate(names.FLEET_HANDOFFS, "handoff")},
        "streamed while the prompt was computed, or offered when it was done.",
    ),
    graph(
        "Waiting for KV",
        "s",
        quantiles(names.FLEET_KV_WAIT, "handoff"),
        "From a request's first ask to its first grant. Streamed, it includes the computing of the first chunk.",
    ),
    graph(
        "Reading KV",
        "s",
        quantiles(names.FLEET_KV_READ, "handoff"),
        "How long a request's KV was being read. Good: small beside its TTFT.",
    ),
    graph(
        "Prompt tokens/s computed twice",
        "short",
        {
            WORKER + " silent re-prefill": rate(names.WORKER_RECOMPUTED, BY_WORKER),
            "decode workers, tails and all": rate(names.FLEET_RECOMPUTED),
            "after preemptions": rate(names.FLEET_REPREFILLED),
        },
        "Good: no silent re-prefill. Answers are right in spite of it, but prompts are paid for twice.",
    ),
    graph(
        "Read back instead of computed (tokens/s)",
        "short",
        {"read back": rate(names.FLEET_READBACK)},
        "Earlier turns that the prefill worker fetched from others, where that ends sooner than computing.",
    ),
    graph(
        "Refused for lack of cache",
        "reqps",
        {WORKER: rate(names.WORKER_REFUSED, BY_WORKER)},
        "Requests below their cache hit threshold, which then go elsewhere. Good: few; each costs a round trip.",
    ),
)

MOVING = (
    graph(
        "KV received",
        "Bps",
        {WORKER: rate(names.WORKER_RECEIVED_BYTES, BY_WORKER)},
        "Read from other workers' memory.",
    ),
    graph(
        "Bandwidth while receiving",
        "Bps",
        {WORKER: share(rate(names.WORKER_RECEIVED_BYTES, BY_WORKER), rate(names.WORKER_RECEIVED_SECONDS, BY_WORKER))},
        "Bytes over the time in which something was being read. Good: near what the network does.",
    ),
    graph(
        "KV received in an hour",
        "bytes",
        {"received": increase(names.FLEET_RECEIVED_BYTES)},
        "By all workers, those that are gone included.",
    ),
    graph(
        "Leases held",
        "short",
        {WORKER: gauge(names.WORKER_LEASES_HELD, BY_WORKER)},
        "On a worker's blocks now. Good: back at 0 within seconds of the last request.",
    ),
    graph(
        "Blocks pinned by leases",
        "short",
        {WORKER: gauge(names.WORKER_PINNED, BY_WORKER)},
        "Blocks that cannot be used again before their leases end. Good: back at 0 with the leases.",
    ),
    graph(
        "Leases/s by outcome",
        "short",
        {"{{outcome}}": rate(names.WORKER_LEASES, "outcome")},
        "Good: released as often as granted. expired: readers died or are slow. refused: too much is pinned.",
    ),
    graph(
        "Reads under way",
        "short",
        {WORKER: gauge(names.WORKER_READS_RUNNING, BY_WORKER)},
        "From others' memory, now.",
    ),
    graph(
        "Reads/s by outcome",
        "short",
        {WORKER + " {{outcome}}": rate(names.WORKER_READS, "worker_id, role, outcome")},
        "Good: none failed. What was not read is computed.",
    ),
)

STORES = (
    graph("Blocks in stores", "short", {STORE + " {{tier}}": gauge(names.STORE_BLOCKS, BY_TIER)}, "By tier."),
    graph("KV in stores", "bytes", {STORE + " {{tier}}": gauge(names.STORE_BYTES, BY_TIER)}, "By tier."),
    Panel(
        title="How full stores are",
        unit="percentunit",
        queries={
            STORE + " {{tier}}": share(gauge(names.STORE_BLOCKS, BY_TIER), gauge(names.STORE_BLOCKS_MAX, BY_TIER))
        },
        meaning="Full is usual in the end. Full and evicting much: more room would save more prompts.",
        warn=FULL,
    ),
    graph(
        "KV that stores take and give",
        "Bps",
        {
            STORE + " takes": rate(names.WORKER_RECEIVED_BYTES, "worker_id", 'role="store"'),
            STORE + " gives": rate(names.STORE_GRANTED, "worker_id"),
        },
        "Good: they give more than they take. Else they are not worth their memory.",
    ),
    graph(
        "Blocks/s that stores load and save",
        "short",
        {STORE + " {{kind}} {{outcome}}": rate(names.STORE_MOVED, BY_KIND)},
        "From files and to them. Good: all done.",
    ),
    graph(
        "Blocks that stores are to load and save",
        "short",
        {STORE + " {{kind}}": gauge(names.STORE_WAITING, "worker_id, kind")},
        "Good: near 0. Else their disk is too slow.",
    ),
    graph(
        "Blocks/s that stores evict",
        "short",
        {STORE + " {{tier}}": rate(names.STORE_EVICTED, BY_TIER)},
        "That made room for others. Of host they may still be in files; of disk they are gone.",
    ),
    Panel(
        title="Blocks that stores lost in an hour",
        unit="short",
        queries={STORE + " {{kind}} {{outcome}}": increase(names.STORE_MOVED, BY_KIND, 'outcome!="done"')},
        meaning="Good: 0. Damaged or not saved: its disk is full or does not keep what is written.",
        bad=1,
    ),
    graph(
        "Room left on stores' disks",
        "bytes",
        {STORE: gauge(names.STORE_DISK_FREE, "worker_id")},
        "Free on the file system with its files, as it says itself. Stores without files are not shown.",
    ),
)

KV_EXCHANGE = (*PROMPTS, *MOVING, *STORES)
