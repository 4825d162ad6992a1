"""Findings about the running system: NATS, services and access. ``workers`` has those about workers."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator

from services.launcher.doctor.findings import Area, Finding, HeardService, Level, Nats, RouterReply, SystemFacts, named
from shared.contracts.control import DISK_LOW, DISK_MIN, ServicePhase
from shared.text.fleet_text import many
from shared.text.formats import duration, in_bytes

PAYLOAD_BYTES_MIN = 256 * 1024
"""NATS splits ordinary messages into many parts if its limit is smaller."""
RTT_S_MAX = 0.05
"""Each request needs several round trips."""
SKEW_S_MAX = 2.0
"""Difference between the clocks of two machines; delays on a busy machine are smaller."""
NATS_VERSION_MIN = (2, 11)
"""First version in which key-value entries expire by themselves."""
HOST = re.compile(r"^\w+://(?:[^@/]*@)?(\[[^\]]*\]|[^:/,]*)")
"""The host part of a URL."""
LOOPBACK = frozenset({"127.0.0.1", "localhost", "[::1]"})
PROBES = {"registry": "The registry of workers", "fleet": "The fleet", "routers": "Routers over HTTP"}
NEEDED = {"router": "Clients cannot send requests.", "orchestrator": "No process detects lost workers."}
START_IT = "`baton up` starts one. Its log says why it stopped (logs/ in the state directory, or docker compose logs)."
_bus, _service, _access = Area.BUS.finding, Area.SERVICES.finding, Area.ACCESS.finding


def about_bus(facts: SystemFacts) -> Iterator[Finding]:
    """Findings about NATS."""
    if facts.nats is None:
        if facts.is_expected:
            yield _no_nats(facts)
        return
    yield from _server(facts.nats, facts.nats_url)
    if facts.failure:
        yield _bus(Level.ERROR, "This command cannot connect to it.", facts.failure)


def about_services(facts: SystemFacts) -> Iterator[Finding]:
    """Running and missing services, and what each reports."""
    if facts.nats is None or facts.failure or not facts.is_running:
        return
    for probe, why in facts.unknown.items():
        yield _service(Level.NOTE, f"{PROBES.get(probe, probe)} could not be checked: {why}.")
    kinds: dict[str, list[HeardService]] = defaultdict(list)
    for one in facts.services:
        if one.status.phase is not ServicePhase.STOPPED:
            kinds[one.status.service].append(one)
    for kind in ("router", "orchestrator", "collector"):
        yield _availability(kind, kinds[kind], facts)
    for one in facts.services:
        yield from _status(one)
        yield from _disks(one)
    yield from _leader(facts)
    yield from _versions(facts)
    yield from _clocks(facts)
    for reply in facts.routers:
        yield from _over_http(reply)


def _disks(one: HeardService) -> Iterator[Finding]:
    """File systems with little space, on any machine."""
    for disk in one.status.disks:
        if disk.is_below(DISK_LOW):
            free, name = in_bytes(disk.free_bytes), f"{one.status.service} {one.status.instance}"
            what = f"Only {free} of {in_bytes(disk.size_bytes)} free for {disk.folder} of {name} on {one.status.host}."
            level = Level.ERROR if disk.is_below(DISK_MIN) else Level.WARNING
            why = "On a full disk NATS cannot store the default mode, nothing can be started, and logs are lost."
            yield _service(level, what, why, "Free space there, or set BATON_STATE_DIR to another disk.")


def about_access(facts: SystemFacts) -> Iterator[Finding]:
    """Whether clients without credentials have access."""
    if facts.nats is None:
        return
    nats_open = not (facts.nats.auth_required or facts.nats.tls_required)
    far = not _is_local(facts.nats_url)
    if nats_open and far:
        why = "Every client that reaches it can read prompts and give orders to workers."
        todo = "baton init creates keys, certificates and a configuration for NATS."
        yield _access(Level.WARNING, f"NATS at {facts.nats_url} requires no credentials.", why, todo)
    elif nats_open:
        why = "Every user of this machine can read prompts and give orders to workers."
        todo = "Start it without `baton up --open`, or with the configuration that baton init creates."
        yield _access(Level.NOTE, "NATS requires no credentials; it is reached over loopback.", why, todo)
    else:
        tls = "with TLS" if facts.nats.tls_required else "without TLS"
        yield _access(
            Level.OK if facts.nats.tls_required or not far else Level.WARNING, f"NATS requires credentials, {tls}"
        )
    for reply in facts.routers:
        yield from _keys(reply)


def _no_nats(facts: SystemFacts) -> Finding:
    what = f"NATS at {facts.nats_url} does not respond."
    ours = f"`baton up` (pid {facts.launcher_pid}) restarts it; nats.log in its logs/ says why it stopped."
    todo = (
        ours
        if facts.launcher_pid
        else "Check the address (--nats-url, BATON_NATS_URL), and that nats-server runs there."
    )
    return _bus(Level.ERROR, what, facts.failure or "Services communicate over NATS only.", todo)


def _server(nats: Nats, url: str) -> Iterator[Finding]:
    rtt = f", round trip {duration(nats.rtt_s)}" if nats.rtt_s else ""
    yield _bus(Level.OK, f"NATS {nats.version} at {url}, messages up to {in_bytes(nats.max_payload)}{rtt}")
    if not nats.jetstream:
        todo = "Start nats-server with --jetstream and a --store_dir."
        yield _bus(Level.ERROR, "JetStream is off.", "It stores the registry of workers: no worker can register.", todo)
    version = tuple(int(part) for part in nats.version.split("-")[0].split(".")[:2] if part.isdecimal())
    if version and version < NATS_VERSION_MIN:
        why = "Key-value entries do not expire in it, so dead workers stay registered."
        yield _bus(
            Level.ERROR,
            f"NATS {nats.version} is older than {'.'.join(map(str, NATS_VERSION_MIN))}.",
            why,
            "Update nats-server.",
        )
    if 0 < nats.max_payload < PAYLOAD_BYTES_MIN:
        why = "Snapshots and long prompts are split into many messages."
        todo = "Set max_payload: 1MB in nats-server's configuration."
        yield _bus(Level.WARNING, f"NATS accepts messages up to {in_bytes(nats.max_payload)} only.", why, todo)
    if nats.rtt_s > RTT_S_MAX:
        why = "Every request waits for at least one such round trip."
        todo = "Check the load of its machine and the network. Run nats-server near the workers."
        yield _bus(Level.WARNING, f"NATS takes {duration(nats.rtt_s)} for a round trip.", why, todo)


def _availability(kind: str, heard: list[HeardService], facts: SystemFacts) -> Finding:
    ready = [one.status for one in heard if one.status.phase is ServicePhase.READY]
    if ready:
        where = named(sorted({status.url for status in ready if status.url}))
        count = many(len(ready), kind)
        return _service(Level.OK, f"{count} ready{f': {where}' if where else ''}")
    if heard:
        status = heard[0].status
        detail = f": {status.detail}" if status.detail else ""
        return _service(Level.WARNING, f"The {kind} is {status.phase.value}{detail}.", NEEDED.get(kind, ""))
    what = f"No {kind} has reported within {facts.heard_s:.0f} s."
    if kind in NEEDED:
        return _service(Level.ERROR, what, NEEDED[kind], START_IT)
    return _service(Level.WARNING, what, "Requests are served, but the fleet's metrics are missing.", START_IT)


def _status(one: HeardService) -> Iterator[Finding]:
    status = one.status
    name = status.instance if status.service in status.instance else f"{status.service} {status.instance}"
    if status.phase is ServicePhase.FAILED:
        yield _service(Level.ERROR, f"{name} has failed.", status.detail, "See its log.")
    if status.warning:
        why = "Until that is corrected the last valid content is in force: a key that was revoked since still works."
        yield _access(
            Level.WARNING, f"{name} cannot use a file: {status.warning}.", why, "Correct or restore the file."
        )
    if one.is_duplicate and status.service != "worker":  # For workers, their load reports show this.
        what = f"Two processes use the name {name}."
        why = "Reports of one are taken for the other's."
        todo = f"Give each its own {status.service.upper()}_INSTANCE."
        yield _service(Level.ERROR, what, why, todo)


def _leader(facts: SystemFacts) -> Iterator[Finding]:
    if facts.fleet is not None:
        yield _service(Level.OK, f"The orchestrator {facts.fleet.leader} leads, term {facts.fleet.term}")
    elif any(one.status.service == "orchestrator" for one in facts.services):
        why = "Without a leader no lost worker is detected and no role is changed."
        todo = "If this lasts longer than 10 s, check JetStream and the orchestrator's log."
        yield _service(Level.ERROR, "An orchestrator runs, but none leads.", why, todo)


def _versions(facts: SystemFacts) -> Iterator[Finding]:
    versions: dict[str, list[str]] = defaultdict(list)
    for one in facts.services:
        if one.status.version:
            versions[one.status.version].append(one.status.instance)
    if len(versions) > 1:
        runs = "; ".join(f"{version}: {named(sorted(names))}" for version, names in sorted(versions.items()))
        why = "This is fine during an upgrade: each version understands the previous and the next one."
        yield _service(Level.WARNING, f"Services of different versions run: {runs}.", why, "Restart the older ones.")
    elif facts.baton and versions and facts.baton not in versions:
        what = f"The system runs {next(iter(versions))}, this command is {facts.baton}."
        yield _service(Level.NOTE, what, "It may not understand all reports.")


def _clocks(facts: SystemFacts) -> Iterator[Finding]:
    timed = [one for one in facts.services if one.status.at_ms]
    off: dict[str, list[HeardService]] = defaultdict(list)
    for one in timed:
        if abs(one.ahead_s) > SKEW_S_MAX:
            off[one.status.host].append(one)
    for host, those in sorted(off.items()):
        worst = max(those, key=lambda one: abs(one.ahead_s))
        by = f"{duration(abs(worst.ahead_s))} {'ahead of' if worst.ahead_s > 0 else 'behind'}"
        instances = named(sorted(one.status.instance for one in those))
        what = f"The clock of {host or 'an unknown machine'} is {by} ours ({instances})."
        why = "Traces and logs of the two machines do not line up. KV leases are not affected."
        todo = "Run a time service on both machines: chrony, or systemd-timesyncd."
        yield _service(Level.WARNING, what, why, todo)
    if timed and not off:
        yield _service(Level.OK, f"All clocks agree within {duration(SKEW_S_MAX)}")


def _over_http(reply: RouterReply) -> Iterator[Finding]:
    if reply.failure:
        why = f"{reply.failure}. It still publishes its status on NATS."
        todo = "Check firewalls, and the address that it listens on (ROUTER_HOST)."
        yield _service(Level.NOTE, f"The router at {reply.url} cannot be reached from here.", why, todo)
    elif not reply.ready:
        what = f"The router at {reply.url} is not ready: {reply.detail or 'see its log'}"
        yield _service(Level.ERROR, what, "It rejects requests with 503.", "See the findings about workers below.")


def _keys(reply: RouterReply) -> Iterator[Finding]:
    if reply.requires_key is None:
        return
    if reply.requires_key:
        yield _access(Level.OK, f"The router at {reply.url} requires API keys")
    elif _is_local(reply.url):
        yield _access(Level.OK, f"The router at {reply.url} requires no API keys; only this machine can reach it")
    else:
        why = "Every client that reaches it can use it, and can guess other clients' prompts from response times."
        todo = "Create a key with baton keys new and set ROUTER_KEYS_FILE (compose: KEYS_FILE). Or listen on 127.0.0.1."
        yield _access(Level.WARNING, f"The router at {reply.url} requires no API keys.", why, todo)


def _is_local(url: str) -> bool:
    found = HOST.match(url)
    return found is not None and found[1] in LOOPBACK
