"""Findings about the running system: NATS, the services on it, and who gets in. Workers: see ``doctor_workers``."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator

from services.launcher.doctor.facts import HeardService, Nats, RouterAnswer, SystemFacts
from services.launcher.doctor.findings import Area, Finding, Level, many, named
from shared.contracts.control import ServicePhase
from shared.text.quantities import duration, in_bytes

PAYLOAD_BYTES_MIN = 256 * 1024
"""Below this every longer message travels in many parts."""
RTT_S_MAX = 0.05
"""Each leg of a request is a round trip or two."""
SKEW_S_MAX = 2.0
"""Between the wall clocks of two machines; what a busy machine delays is less."""
NATS_VERSION_MIN = (2, 11)
"""From which kept values expire by themselves."""
HOST = re.compile(r"^\w+://(?:[^@/]*@)?(\[[^\]]*\]|[^:/,]*)")
"""In an address."""
LOOPBACK = frozenset({"127.0.0.1", "localhost", "[::1]"})
PROBES = {"registry": "The registry of workers", "fleet": "The fleet", "routers": "Routers over HTTP"}
NEEDED = {"router": "Nobody can send requests.", "orchestrator": "Nobody notices for the fleet that a worker died."}
START_IT = "`baton up` starts one; its log says why it ended (logs/ in the state directory, or docker compose logs)."


def about_bus(facts: SystemFacts) -> Iterator[Finding]:
    """NATS."""
    if facts.nats is None:
        if facts.is_expected:
            yield _nats_silent(facts)
        return
    yield from _server(facts.nats, facts.nats_url)
    if facts.failure:
        yield _bus(Level.ERROR, "The command line cannot connect to it.", facts.failure)


def about_services(facts: SystemFacts) -> Iterator[Finding]:
    """Who runs, who should and does not, and what each says of itself."""
    if facts.nats is None or facts.failure or not facts.is_running:
        return
    for probe, why in facts.unknown.items():
        yield _service(Level.NOTE, f"{PROBES.get(probe, probe)} could not be looked at: {why}.")
    kinds: dict[str, list[HeardService]] = defaultdict(list)
    for one in facts.services:
        if one.status.phase is not ServicePhase.STOPPED:
            kinds[one.status.service].append(one)
    for kind in ("router", "orchestrator", "collector"):
        yield _there(kind, kinds[kind], facts)
    for one in facts.services:
        yield from _said(one)
    yield from _leader(facts)
    yield from _versions(facts)
    yield from _clocks(facts)
    for answer in facts.routers:
        yield from _over_http(answer)


def about_access(facts: SystemFacts) -> Iterator[Finding]:
    """Whether strangers could use it."""
    if facts.nats is None:
        return
    nats_open = not (facts.nats.auth_required or facts.nats.tls_required)
    far = not _is_local(facts.nats_url)
    if nats_open and far:
        why = "Everybody who reaches it can read prompts and give orders to workers."
        todo = "baton init makes keys, certificates and NATS's configuration."
        yield _access(Level.WARNING, f"NATS at {facts.nats_url} asks for no credentials.", why, todo)
    elif nats_open:
        yield _access(Level.OK, "NATS asks for no credentials; we reach it over loopback")
    else:
        tls = "with TLS" if facts.nats.tls_required else "without TLS"
        yield _access(
            Level.OK if facts.nats.tls_required or not far else Level.WARNING, f"NATS asks for credentials, {tls}"
        )
    for answer in facts.routers:
        yield from _keys(answer)


def _nats_silent(facts: SystemFacts) -> Finding:
    what = f"NATS at {facts.nats_url} does not answer."
    ours = f"`baton up` (pid {facts.launcher_pid}) starts it again; nats.log in its logs/ says why it ended."
    todo = (
        ours if facts.launcher_pid else "Is the address right (--nats-url, BATON_NATS_URL)? Does nats-server run there?"
    )
    return _bus(Level.ERROR, what, facts.failure or "No service can reach another without it.", todo)


def _server(nats: Nats, url: str) -> Iterator[Finding]:
    rtt = f", {duration(nats.rtt_s)} there and back" if nats.rtt_s else ""
    yield _bus(Level.OK, f"NATS {nats.version} at {url}, messages up to {in_bytes(nats.max_payload)}{rtt}")
    if not nats.jetstream:
        todo = "Start nats-server with --jetstream and a --store_dir."
        yield _bus(Level.ERROR, "JetStream is off.", "The registry of workers is kept in it: nobody can join.", todo)
    version = tuple(int(part) for part in nats.version.split("-")[0].split(".")[:2] if part.isdecimal())
    if version and version < NATS_VERSION_MIN:
        why = "Kept values must expire by themselves, or a dead worker stays registered."
        yield _bus(
            Level.ERROR, f"NATS {nats.version} is older than {'.'.join(map(str, NATS_VERSION_MIN))}.", why, "Update it."
        )
    if 0 < nats.max_payload < PAYLOAD_BYTES_MIN:
        why = "Snapshots and long prompts travel in many parts."
        todo = "max_payload: 1MB in nats-server's configuration."
        yield _bus(Level.WARNING, f"NATS takes only {in_bytes(nats.max_payload)} at a time.", why, todo)
    if nats.rtt_s > RTT_S_MAX:
        why = "Every leg of a request waits for at least one such round trip."
        todo = "Is its machine overloaded, or far away? nats-server belongs near the workers."
        yield _bus(Level.WARNING, f"NATS takes {duration(nats.rtt_s)} for a round trip.", why, todo)


def _there(kind: str, heard: list[HeardService], facts: SystemFacts) -> Finding:
    ready = [one.status for one in heard if one.status.phase is ServicePhase.READY]
    if ready:
        where = named(sorted({status.url for status in ready if status.url}))
        count = many(len(ready), kind)
        return _service(Level.OK, f"{count} ready{f': {where}' if where else ''}")
    if heard:
        status = heard[0].status
        detail = f": {status.detail}" if status.detail else ""
        return _service(Level.WARNING, f"The {kind} is {status.phase.value}{detail}.", NEEDED.get(kind, ""))
    what = f"No {kind} was heard within {facts.heard_s:.0f} s."
    if kind in NEEDED:
        return _service(Level.ERROR, what, NEEDED[kind], START_IT)
    return _service(Level.WARNING, what, "Requests are served; metrics of the fleet pause.", START_IT)


def _said(one: HeardService) -> Iterator[Finding]:
    status = one.status
    name = status.instance if status.service in status.instance else f"{status.service} {status.instance}"
    if status.phase is ServicePhase.FAILED:
        yield _service(Level.ERROR, f"{name} has failed.", status.detail, "Its log has the whole story.")
    if one.is_double and status.service != "worker":  # of workers their load reports tell
        what = f"Two processes call themselves {name}."
        why = "What one of them says is taken for the other's."
        todo = f"Give each a name of its own: {status.service.upper()}_INSTANCE."
        yield _service(Level.ERROR, what, why, todo)


def _leader(facts: SystemFacts) -> Iterator[Finding]:
    if facts.fleet is not None:
        yield _service(Level.OK, f"{facts.fleet.leader} leads the fleet, term {facts.fleet.term}")
    elif any(one.status.service == "orchestrator" for one in facts.services):
        why = "Workers are not declared lost, drained or changed until one leads."
        todo = "If this lasts longer than 10 s, see whether JetStream works and what the orchestrator's log says."
        yield _service(Level.ERROR, "An orchestrator runs, but none leads.", why, todo)


def _versions(facts: SystemFacts) -> Iterator[Finding]:
    versions: dict[str, list[str]] = defaultdict(list)
    for one in facts.services:
        if one.status.version:
            versions[one.status.version].append(one.status.instance)
    if len(versions) > 1:
        runs = "; ".join(f"{version}: {named(sorted(names))}" for version, names in sorted(versions.items()))
        why = "Fine while you upgrade: every process understands its neighbours of one version before and after."
        yield _service(Level.WARNING, f"Services of different versions run: {runs}.", why, "Restart the older ones.")
    elif facts.baton and versions and facts.baton not in versions:
        what = f"The system runs {next(iter(versions))}, this command is {facts.baton}."
        yield _service(Level.NOTE, what, "It may not understand everything that it hears.")


def _clocks(facts: SystemFacts) -> Iterator[Finding]:
    told = [one for one in facts.services if one.status.at_ms]
    off: dict[str, list[HeardService]] = defaultdict(list)
    for one in told:
        if abs(one.ahead_s) > SKEW_S_MAX:
            off[one.status.host].append(one)
    for host, those in sorted(off.items()):
        worst = max(those, key=lambda one: abs(one.ahead_s))
        by = f"{duration(abs(worst.ahead_s))} {'ahead of' if worst.ahead_s > 0 else 'behind'}"
        who = named(sorted(one.status.instance for one in those))
        what = f"The clock of {host or 'an unknown machine'} is {by} ours ({who})."
        why = "Traces and logs of the two machines do not line up. Leases of KV do not mind: they allow for it."
        todo = "Have a time service run on both: chrony, or systemd-timesyncd."
        yield _service(Level.WARNING, what, why, todo)
    if told and not off:
        yield _service(Level.OK, f"All clocks agree within {duration(SKEW_S_MAX)}")


def _over_http(answer: RouterAnswer) -> Iterator[Finding]:
    if answer.failure:
        why = f"{answer.failure}. It says on the bus that it runs."
        todo = "Behind a firewall, or bound to an address of another machine? ROUTER_HOST says where it listens."
        yield _service(Level.NOTE, f"The router at {answer.url} is not reached from here.", why, todo)
    elif not answer.ready:
        what = f"The router at {answer.url} is not ready: {answer.detail or 'it does not say why'}"
        yield _service(Level.ERROR, what, "It answers requests with 503.", "What workers say, below, tells more.")


def _keys(answer: RouterAnswer) -> Iterator[Finding]:
    if answer.asks_for_key is None:
        return
    if answer.asks_for_key:
        yield _access(Level.OK, f"The router at {answer.url} asks for API keys")
    elif _is_local(answer.url):
        yield _access(Level.OK, f"The router at {answer.url} asks for no API keys; only this machine reaches it")
    else:
        why = "Everybody who reaches it may use it, and may tell by its speed what others asked."
        todo = "baton keys new makes a key; ROUTER_KEYS_FILE names the file. Or listen on 127.0.0.1."
        yield _access(Level.WARNING, f"The router at {answer.url} asks for no API keys.", why, todo)


def _is_local(url: str) -> bool:
    found = HOST.match(url)
    return found is not None and found[1] in LOOPBACK


def _bus(level: Level, what: str, why: str = "", todo: str = "") -> Finding:
    return Finding(area=Area.BUS, level=level, what=what, why=why, todo=todo)


def _service(level: Level, what: str, why: str = "", todo: str = "") -> Finding:
    return Finding(area=Area.SERVICES, level=level, what=what, why=why, todo=todo)


def _access(level: Level, what: str, why: str = "", todo: str = "") -> Finding:
    return Finding(area=Area.ACCESS, level=level, what=what, why=why, todo=todo)
