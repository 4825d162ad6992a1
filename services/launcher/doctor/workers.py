"""Findings about workers: presence, phases, compatibility, and the routers' view of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from services.launcher.doctor.findings import (
    Area,
    Finding,
    HeardLoad,
    InstallationFacts,
    Level,
    SystemFacts,
    cost_of_python,
    in_python,
    named,
)
from services.launcher.system.devices import A_CORE_FOR_EACH, RANKS_ARE_BUSY
from shared.contracts.control import RouterHealth, ServicePhase
from shared.contracts.load import ENGINE_SILENT_S_MAX, LOOP_LATE_S_MAX, LoadReport
from shared.contracts.message import WIRE_VERSION
from shared.contracts.workers import (
    WITHOUT_ENGINE,
    FleetWorker,
    KvMemory,
    KvReadSpeed,
    Role,
    WorkerPhase,
    WorkerRecord,
    looks_for_notices,
)
from shared.text.fleet_text import many
from shared.text.formats import bytes_per_second, counted, duration

STARTING_S_MAX = 600.0
"""A large model on slow disks starts within this time."""
PROBING_S_MAX = 60.0
SILENT_S_MAX = 3.0
KV_FULL = 0.95
"""Used share of the KV cache above which requests wait or are preempted."""
PREFILLS = frozenset({Role.PREFILL, Role.BOTH})
DECODES = frozenset({Role.DECODE, Role.BOTH})
MEANINGS = {
    "dtype": "another number format",
    "block_size": "another block size",
    "kv_layout": "another processor, cache type or layout",
    "connector": "another connector, or another version of it",
    "engine_version": "another version of the engine",
    "options": "other options of the engine",
}
"""Descriptions of fingerprint fields."""
BOUNDARY_SETTINGS = {
    "block_size": "--block-size",
    "block": "--block-size",
    "unit": "--prefix-match-unit",
    "hybrid_manager_off": "--disable-hybrid-kv-cache-manager (chosen where prefix caching is off)",
}
"""vLLM's option for each field of a fingerprint, or word of its options, on which the boundaries of prefixes depend."""
_finding = Area.WORKERS.finding


def about_workers(facts: SystemFacts) -> Iterator[Finding]:
    if facts.nats is None or facts.failure or not facts.is_running:
        return
    if not facts.records:
        todo = "`baton up --join` adds one; `baton workers` also shows workers that are starting."
        yield _finding(Level.ERROR, "No worker is registered.", "Every request is rejected with 503.", todo)
        for worker in facts.fleet.workers if facts.fleet is not None else ():
            yield from _life(worker)
        return
    loads = {heard.report.worker_id: heard for heard in facts.loads}
    yield _counts(facts.records)
    for record in facts.records:
        yield from _reports(record, loads.get(record.worker_id), facts)
        yield from _settings(record)
    yield from _unregistered(facts, loads)
    if facts.fleet is not None:
        for worker in facts.fleet.workers:
            yield from _life(worker)
    else:
        for record in facts.records:
            if record.phase is not WorkerPhase.READY:
                yield _finding(Level.NOTE, f"{record.worker_id} is {record.phase.value}.", record.note)
    yield from _models(facts.records)
    yield from about_kv_reads(facts.records)
    yield from about_grants(facts.records)
    yield from about_listening(facts.records)
    for heard in facts.loads:
        yield from _load(heard)
    yield from _known_to_routers(facts)


def about_cores(here: InstallationFacts, facts: SystemFacts) -> Iterator[Finding]:
    """Engines on this machine's CPU, one of them with several ranks, that have more ranks than there are cores."""
    ranks = [each.ranks for each in facts.records if each.engine == "vllm" and each.host == facts.host]
    if not here.gpus and max(ranks, default=1) > 1 and sum(ranks) > here.cores > 0:
        what = f"The engines on this machine have {sum(ranks)} ranks, but there are {many(here.cores, 'core')}."
        yield _finding(Level.WARNING, what, RANKS_ARE_BUSY, A_CORE_FOR_EACH)


def _counts(records: list[WorkerRecord]) -> Finding:
    ready = [record for record in records if record.phase is WorkerPhase.READY]
    roles = [(role, sum(record.role is role for record in ready)) for role in Role]
    text = ", ".join(f"{count} {role.value}" for role, count in roles if count)
    what = f"{len(ready)} of {many(len(records), 'worker')} ready{f': {text}' if text else ''}"
    if ready:
        return _finding(Level.OK, what)
    if any(record.phase is WorkerPhase.ASLEEP for record in records):
        return _finding(Level.NOTE, f"{what}; the others sleep.", "A request for a model wakes its workers.")
    loading = all(record.phase in {WorkerPhase.STARTING, WorkerPhase.PROBING} for record in records)
    wait = "Wait: engines take seconds to minutes to load. " if loading else ""
    todo = f"{wait}`baton workers` shows what each one does."
    return _finding(Level.ERROR, f"{what}.", "Every request is rejected with 503.", todo)


def _reports(record: WorkerRecord, heard: HeardLoad | None, facts: SystemFacts) -> Iterator[Finding]:
    worker = record.worker_id
    if record.phase in {*WITHOUT_ENGINE, WorkerPhase.GONE}:
        return
    if heard is None:
        what = f"{worker} is registered but has not reported within {facts.heard_s:.0f} s."
        why = f"A healthy worker reports every second ({record.host}, pid {record.pid})."
        yield _finding(Level.ERROR, what, why, "Check that its process runs and reaches NATS: see its log.")
    elif heard.is_duplicate:
        what = f"Two processes report as {worker}."
        why = "Routers use the newer one; requests on the other are lost."
        yield _finding(Level.ERROR, what, why, "Stop one, or give it another WORKER_WORKER_ID.")
    elif heard.report.epoch < record.epoch:
        what = f"An earlier process of {worker} still reports."
        why = "It is ignored, and the registered process does not report."
        yield _finding(
            Level.ERROR,
            what,
            why,
            f"Stop the earlier process on {record.host}; pid {record.pid} is the registered one.",
        )


def _settings(record: WorkerRecord) -> Iterator[Finding]:
    if record.wire_version != WIRE_VERSION:
        what = f"{record.worker_id} uses wire version {record.wire_version}; this command uses {WIRE_VERSION}."
        yield _finding(
            Level.ERROR, what, "They may misunderstand each other.", "Install the same Baton version on both."
        )
    if record.phase is WorkerPhase.READY and record.note:
        yield _finding(Level.NOTE, f"{record.worker_id}: {record.note}.")
    if record.role is not Role.STORE and not record.prefix_caching and not record.attached:
        what = f"{record.worker_id} has no prefix cache."
        yield _finding(
            Level.NOTE, what, "It computes every prompt from scratch.", "Leave out --no-enable-prefix-caching."
        )


def _unregistered(facts: SystemFacts, loads: Iterable[str]) -> Iterator[Finding]:
    for worker in sorted(set(loads) - {record.worker_id for record in facts.records}):
        what = f"{worker} reports its load but is not in the registry."
        why = "Routers place no requests on it."
        todo = "It should register within seconds. If it does not, JetStream rejects its writes: see its log."
        yield _finding(Level.WARNING, what, why, todo)


def _life(worker: FleetWorker) -> Iterator[Finding]:
    name, note = worker.record.worker_id, worker.record.note
    since = duration(worker.since_s)
    if worker.phase is WorkerPhase.LOST:
        what, why = f"{name} was lost {since} ago.", "It stopped reporting: its process ended or cannot reach NATS."
        if worker.record.role is Role.STORE:
            tokens = round(worker.kv_used * worker.record.kv_tokens)
            what = f"{name} was lost {since} ago, and with its memory KV of {counted(tokens)} tokens."
            why += " Engines compute them again, unless its files have them when it is back."
        todo = "`baton up` restarts its own workers. Elsewhere, see its log and start it again."
        yield _finding(Level.WARNING, what, why, todo)
    elif worker.phase is WorkerPhase.STARTING and worker.since_s > STARTING_S_MAX:
        why = note or "It gets no requests until it is ready."
        yield _finding(Level.WARNING, f"{name} has been starting for {since}.", why, "Its log shows what it waits for.")
    elif worker.phase is WorkerPhase.PROBING and worker.record.attached:
        what = f"{name} gets no requests: its server has been away for {since}."
        todo = "Start that server, or see its log: the worker takes requests again when it answers."
        yield _finding(Level.WARNING, what, f"It is {note}.", todo)
    elif worker.phase is WorkerPhase.PROBING and worker.since_s > PROBING_S_MAX:
        why = note or "It gets no requests until its KV self-test succeeds."
        todo = "It needs another reachable worker of the same model: see its log, and NIXL above."
        yield _finding(Level.WARNING, f"{name} has been probing for {since}.", why, todo)
    elif worker.phase in {WorkerPhase.STARTING, WorkerPhase.PROBING}:
        yield _finding(Level.NOTE, f"{name} has been {worker.phase.value} for {since}.", note)
    elif worker.phase is WorkerPhase.ASLEEP:
        yield _finding(Level.NOTE, f"{name} has been asleep for {since}.", "A request for its model wakes it.")
    elif worker.phase is WorkerPhase.DRAINING:
        yield _finding(Level.NOTE, f"{name} has been draining for {since}.", note)
    elif worker.phase is WorkerPhase.READY and worker.silent_s > SILENT_S_MAX:
        what = f"{name} has not reported to the orchestrator for {duration(worker.silent_s)}."
        yield _finding(
            Level.WARNING, what, "It will be declared lost.", "Check the load and the network of its machine."
        )


def _models(records: list[WorkerRecord]) -> Iterator[Finding]:
    serving: dict[str, list[WorkerRecord]] = defaultdict(list)
    for record in records:
        if record.role is not Role.STORE and record.phase is WorkerPhase.READY and record.models:
            serving[record.model].append(record)
    for model, those in sorted(serving.items()):
        yield from _roles(model, those)
        engines = [record for record in those if not record.attached]
        yield from _revisions(model, engines)
        yield from _schemes(model, engines)
        yield from about_adapters(model, engines)


def _roles(model: str, records: list[WorkerRecord]) -> Iterator[Finding]:
    roles = {record.role for record in records}
    if not roles & PREFILLS or not roles & DECODES:
        there, missing = ("prefill", "decode") if roles & PREFILLS else ("decode", "prefill")
        what = f"{model} has ready workers for {there} only."
        why = f"Each {there} worker also computes the other phase."
        yield _finding(Level.WARNING, what, why, f"baton up --join --{missing} 1, or baton role ID {missing}")


def _revisions(model: str, records: list[WorkerRecord]) -> Iterator[Finding]:
    revisions: dict[str, list[WorkerRecord]] = defaultdict(list)
    for record in records:
        revisions[record.fingerprint.revision].append(record)
    if len(revisions) > 1:
        groups = "; ".join(f"{rev or 'none'}: {_names(those)}" for rev, those in sorted(revisions.items()))
        why = "Different revisions do not exchange KV. `/v1/models` shows how conversations are divided."
        todo = "If this is not intended, start them with the same weights. ROUTER_REVISION_SHARES sets the shares."
        yield _finding(Level.NOTE, f"{model} runs in {len(revisions)} revisions ({groups}).", why, todo)
    for those in revisions.values():
        yield from _fingerprints(model, those)


def _fingerprints(model: str, records: list[WorkerRecord]) -> Iterator[Finding]:
    """Whether the engines of one model and one revision can exchange KV."""
    groups: dict[str, list[WorkerRecord]] = defaultdict(list)
    for record in records:
        groups[record.fingerprint.key()].append(record)
    if len(groups) < 2:
        if len(records) > 1:
            yield _finding(Level.OK, f"The {len(records)} engines of {model} can exchange KV: their fingerprints match")
        return
    pairs = any({r.role for r in those} & PREFILLS and {r.role for r in those} & DECODES for those in groups.values())
    first, *others = sorted(groups.values(), key=len, reverse=True)
    for those in others:
        differing = list(_differing(first[0], those[0]))
        fields = "; ".join(f"{name} is {_difference(ours, theirs)}" for name, ours, theirs in differing)
        what = f"{_names(first)} and {_names(those)} cannot exchange KV: {fields}."
        meaning = ", ".join(MEANINGS.get(name, name) for name, _, _ in differing)
        apart = "" if pairs else " No prefill worker matches a decode worker: no request can be disaggregated."
        todo = "Use the same weights, dtype, vLLM, NIXL and --engine-args, and the same kind of processor."
        if settings := _settings_of_boundaries(differing):
            todo += f" Where prefixes meet, both engines need the same {' and '.join(settings)}."
        if len({r.fingerprint.kv_backend for r in (first[0], those[0])}) > 1:
            todo += " NIXL moves KV by one plug-in at both ends: give both workers the same WORKER_KV_BACKEND."
        yield _finding(Level.WARNING if pairs else Level.ERROR, what, f"The difference: {meaning}.{apart}", todo)


def _differing(one: WorkerRecord, other: WorkerRecord) -> Iterator[tuple[str, object, object]]:
    theirs = msgspec.structs.asdict(other.fingerprint)
    for name, value in msgspec.structs.asdict(one.fingerprint).items():
        if value != theirs[name]:
            yield name, value or "none", theirs[name] or "none"


def _difference(ours: object, theirs: object) -> str:
    """Two values; of lists of options, those that are in one only."""
    one, other = str(ours).split(), str(theirs).split()
    if len(one) + len(other) == 2:
        return f"{ours} and {theirs}"
    only = [
        " ".join(word for word in words if word not in than) or "none" for words, than in ((one, other), (other, one))
    ]
    return " and ".join(only)


def _settings_of_boundaries(differing: Sequence[tuple[str, object, object]]) -> list[str]:
    """The options of vLLM that must be equal for two engines to exchange KV at the same boundaries, and are not."""
    names = {name for name, _ours, _theirs in differing}
    for name, ours, theirs in differing:
        if name == "options":
            names |= {word.partition("=")[0] for word in set(str(ours).split()) ^ set(str(theirs).split())}
    return list(dict.fromkeys(setting for name, setting in BOUNDARY_SETTINGS.items() if name in names))


def _schemes(model: str, records: list[WorkerRecord]) -> Iterator[Finding]:
    schemes: dict[tuple[str, str, int], list[WorkerRecord]] = defaultdict(list)
    for record in records:
        hashing = record.hashing
        schemes[hashing.algorithm, hashing.seed, hashing.block_size].append(record)
    if len(schemes) > 1:
        groups = "; ".join(f"{_names(those)}: {scheme[0]}, blocks of {scheme[2]}" for scheme, those in schemes.items())
        why = "Their block hashes differ, so a prefix cached on one is not recognised on the other."
        todo = "Use the same --block-size and --prefix-caching-hash-algo for all."
        yield _finding(Level.WARNING, f"Workers of {model} hash their KV blocks differently ({groups}).", why, todo)


def _load(heard: HeardLoad) -> Iterator[Finding]:
    load, store = heard.report, heard.report.store
    if load.engine_silent_s > ENGINE_SILENT_S_MAX:
        what = f"The engine of {load.worker_id} has answered nothing for {duration(load.engine_silent_s)}."
        why = "Routers send it no new requests. If it stays so for three minutes, its worker ends and is started again."
        yield _finding(Level.WARNING, what, why, f"The log of {load.worker_id} may say why.")
    if load.loop_late_s > LOOP_LATE_S_MAX:
        what = f"The event loop of {load.worker_id} has been held for {duration(load.loop_late_s)}."
        why = "Routers send it no new requests. After a minute it counts as lost, and `baton up` starts it again."
        yield _finding(Level.WARNING, what, why, "`kill -QUIT PID` writes to its log where each of its threads is.")
    used = load.kv_used
    if store is None:
        if used > KV_FULL and load.waiting:
            what = f"The KV cache of {load.worker_id} is full ({used:.0%}) and {many(load.waiting, 'request')} wait."
            todo = "Use a larger --kv-cache, or add workers: baton up --join --decode 1."
            yield _finding(Level.WARNING, what, "Requests wait in the engine or are preempted.", todo)
        yield from _lost_copies(load)
        return
    if store.objects_silent_s:
        what = f"The object store of {load.worker_id} has answered no call for {duration(store.objects_silent_s)}."
        why = "What only it has is computed again, and nothing more is saved there. The store tries every ten seconds."
        todo = f"The log of {load.worker_id} says why: look at WORKER_STORE_OBJECTS_URL and its credentials."
        yield _finding(Level.WARNING, what, why, todo)
    places = "files and objects" if store.object_blocks_max else "files"
    if lost := store.damaged_blocks_total + store.unsaved_blocks_total:
        what = (
            f"{load.worker_id} has lost {counted(lost)} blocks: {counted(store.damaged_blocks_total)} damaged in its "
        )
        what += f"{places}, {counted(store.unsaved_blocks_total)} not saved."
        todo = f"Check its {'disk and its bucket' if store.object_blocks_max else 'disk'}. "
        todo += "BATON_STATE_DIR of the store sets another folder."
        yield _finding(Level.WARNING, what, "Lost blocks are computed again.", todo)
    tiers = (
        (store.object_blocks, store.object_blocks_max, "WORKER_STORE_OBJECTS_BYTES"),
        (store.disk_blocks, store.disk_blocks_max, "WORKER_STORE_FILES_BYTES"),
        (store.host_blocks, store.host_blocks_max, "WORKER_STORE_FILES_BYTES"),
    )
    stored, capacity, setting = next((tier for tier in tiers if tier[1]), tiers[-1])
    if capacity and stored >= capacity:
        what = f"{load.worker_id} is full: it stores {counted(stored)} blocks and evicts the oldest for new ones."
        why = "This is normal, unless evicted prefixes are needed again."
        yield _finding(Level.NOTE, what, why, f"{setting} raises the limit.")


def _lost_copies(load: LoadReport) -> Iterator[Finding]:
    """What an engine evicted before a store had copied it."""
    state = load.exchange
    if state is None or not state.lost_blocks_total:
        return
    lost, copied = state.lost_blocks_total, state.copied_blocks_total
    what = f"{load.worker_id} evicted {counted(lost)} recently used blocks before a store had them; {counted(copied)} "
    what += "were copied."
    why = "They are computed again. Prompts fill its cache faster than a store reads it, or the store was away."
    level = Level.WARNING if lost > copied else Level.NOTE
    yield _finding(level, what, why, "A larger --kv-cache gives the store more time.")


def _known_to_routers(facts: SystemFacts) -> Iterator[Finding]:
    routers = [
        (one.status.instance, one.status.router)
        for one in facts.services
        if one.status.router is not None and one.status.phase is ServicePhase.READY
    ]
    inexact = False
    for router, health in routers:
        for worker, state in sorted(health.not_exact.items()):
            inexact = True
            yield _index(router, worker, state)
        yield from _tokens(router, health)
        if what := in_python(health, f" of {router}"):
            todo = "Install a C compiler where it runs, then `make setup`."
            yield _finding(Level.NOTE, what, cost_of_python(health), todo)
    if routers and not inexact and not all(record.attached for record in facts.records):
        yield _finding(
            Level.OK,
            f"{many(len(routers), 'router')} know{'s' * (len(routers) == 1)} exactly what each engine has cached",
        )


def _index(router: str, worker: str, state: str) -> Finding:
    if state == "degraded":
        what = f"{router} does not know exactly what {worker} has cached (DEGRADED)."
        why = "It missed events and has requested a snapshot; until then it uses its last state."
        return _finding(Level.NOTE, what, why, "Repeat in a few seconds: it should be EXACT then.")
    what = f"{router} does not know what {worker} has cached ({state.upper()})."
    why = f"{worker} sends no snapshots, so the router places on it by load alone."
    todo = f"The log of {worker} says why; restarting it helps."
    return _finding(Level.WARNING, what, why, todo)


def _tokens(router: str, health: RouterHealth) -> Iterator[Finding]:
    if health.tokens_differ:
        what = f"{router} tokenizes differently from {named(sorted(health.tokens_differ))}."
        why = "That model is placed by load alone: cached prefixes are not found."
        todo = "Use the same tokenizer files and chat template. The router's log shows the first token that differs."
        yield _finding(Level.WARNING, what, why, todo)
    for model, failure in sorted(health.tokenizers_failed.items()):
        what = f"{router} does not use what the workers of {model} sent to tokenize with: {failure}."
        why = "That model, or its chats where only the template failed, is placed by load alone."
        todo = "Correct the model's tokenizer or chat template, and restart its workers."
        yield _finding(Level.WARNING, what, why, todo)


def _names(records: list[WorkerRecord]) -> str:
    return named(sorted(record.worker_id for record in records))


DIGEST_CHARS = 12


def about_adapters(model: str, records: list[WorkerRecord]) -> Iterator[Finding]:
    """``records``: ready workers of one model."""
    holders: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        for adapter in record.adapters:
            holders[adapter.name][adapter.digest].append(record.worker_id)
    for name, files in sorted(holders.items()):
        having = {worker for workers in files.values() for worker in workers}
        lacking = [record.worker_id for record in records if record.worker_id not in having]
        if len(files) > 1:
            groups = "; ".join(
                f"{digest[:DIGEST_CHARS]}: {', '.join(sorted(those))}" for digest, those in sorted(files.items())
            )
            what = f"Workers have different files of the adapter {name} ({groups})."
            why = "They exchange no KV of it, and their answers differ."
            todo = f"`baton lora load {name} PATH` loads one version on all."
            yield _finding(Level.WARNING, what, why, todo)
        elif lacking:
            what = f"The adapter {name} of {model} is not loaded on {', '.join(sorted(lacking))}."
            why = "Requests for it go to the others, and are disaggregated only among those."
            todo = f"`baton lora load {name} PATH` loads it on all."
            yield _finding(Level.NOTE, what, why, todo)


SLOW_BYTES_PER_S = {KvMemory.CUDA: 5_000_000_000, KvMemory.CPU: 200_000_000}
"""Limits below which a read is slow for its memory; the alert KvReadsSlow has the same ones. GPU memory moves at more
than 10 GB/s over NVLink, PCIe and RDMA of 100 Gb/s, and at 0.5 to 3 GB/s over TCP. For host memory it is a network of
1 Gb/s (0.12 GB/s) that is called slow.
"""
CUDA_WHY = "UCX probably moves it over TCP or through host memory, so handoffs take longer than they must."
CUDA_TODO = (
    "On one host the workers must see all GPUs and share a PID namespace, on two they need RDMA of 100 Gb/s: "
    '"Moving KV between GPUs" in docs/operating.md. UCX_PROTO_INFO=y makes UCX log the transport of each read.'
)
CPU_WHY = "Handoffs take longer than they must."
CPU_TODO = (
    "Check the network between the two machines and their load, then restart the reader: it measures at its start."
)


def about_kv_reads(records: list[WorkerRecord]) -> Iterator[Finding]:
    """One finding for each slow pair, and one for all others."""
    registered = {record.worker_id for record in records}
    pairs = [
        (record, read)
        for record in sorted(records, key=lambda it: it.worker_id)
        for read in sorted(record.reads_from(registered), key=lambda it: it.source_id)
    ]
    fast = []
    for record, read in pairs:
        if read.bytes_per_s < SLOW_BYTES_PER_S[read.memory]:
            yield _slow(record, read)
        else:
            fast.append(read.bytes_per_s)
    names = [
        f"{record.worker_id} from {read.source_id} at {bytes_per_second(read.bytes_per_s)}"
        + (f" ({read.way})" if read.way else "")
        for record, read in pairs
    ]
    if fast and len(fast) == len(pairs):
        yield _finding(Level.OK, f"KV self-tests read {named(names)}")


def about_grants(records: list[WorkerRecord]) -> Iterator[Finding]:
    """Which way grants take between machines, and how long on both: a worker chooses by what its self-test measures."""
    registered = {record.worker_id for record in records}
    noticed, told = [], []
    for record in sorted(records, key=lambda it: it.worker_id):
        for read in sorted(record.reads_from(registered), key=lambda it: it.source_id):
            if read.notice_s and read.bus_s:
                pair = f"{record.worker_id} from {read.source_id} in"
                notice, bus = duration(read.notice_s), duration(read.bus_s)
                if looks_for_notices(read.notice_s, read.bus_s):
                    noticed.append(f"{pair} {notice} (over the bus {bus})")
                else:
                    told.append(f"{pair} {bus} (as notifications {notice})")
    if noticed:
        yield _finding(Level.OK, f"grants of KV come first as NIXL notifications: {named(noticed)}")
    if told:
        yield _finding(Level.OK, f"grants of KV take the bus alone: {named(told)}")


def _slow(record: WorkerRecord, read: KvReadSpeed) -> Finding:
    memory = "GPU" if read.memory is KvMemory.CUDA else "host"
    speed = bytes_per_second(read.bytes_per_s)
    over = f" over {read.way}" if read.way else ""
    what = f"{record.worker_id} reads KV from {read.source_id}{over} at {speed}, slow for {memory} memory."
    why, todo = (CUDA_WHY, CUDA_TODO) if read.memory is KvMemory.CUDA else (CPU_WHY, CPU_TODO)
    return _finding(Level.WARNING, what, why, todo)


REACHABLE_WHY = (
    "UCX's TCP transport writes where a packet says, without asking who sent it: whoever reaches these ports can read "
    "and change what the engine has in memory."
)
REACHABLE_TODO = (
    "Give the fleet a network of its own, or let UCX_TLS leave out tcp. On one host, leave WORKER_KV_HOST and "
    "UCX_NET_DEVICES unset."
)


def about_listening(records: list[WorkerRecord]) -> Iterator[Finding]:
    """Whether other hosts can reach workers and their engines, as far as they say."""
    known = [record for record in records if record.listens is not None and not record.attached]
    reachable = [record for record in known if record.listens]
    if reachable:
        where = sorted({address for record in reachable for address in record.listens or ()})
        what = f"{_names(reachable)} can be reached by others: KV transfer listens on {named(where)}."
        yield _finding(Level.NOTE, what, REACHABLE_WHY, REACHABLE_TODO)
    elif known:
        yield _finding(Level.OK, f"KV transfer of {many(len(known), 'worker')} listens on loopback only")
