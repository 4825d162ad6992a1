"""Do the replay's transcriptions decide as the systems themselves do? ``python -m bench.peer_decisions``.

A random history of arrivals, first tokens and ends is given to the other system's own code, and then, with the other
system's choices, to the transcription, so that both decide on the same states. Printed: the share of equal decisions, and
each class of difference with an example. The peers are installed from PyPI by ``--install``, each in a venv of its own.
"""

from __future__ import annotations

import argparse
import os
import subprocess
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from bench.peer_router import decisions as routed
from bench.peer_routers import Peer
from bench.peer_scenario import Decision, Scenario, Step, StepKind, scenario
from bench.policies.base import Baseline, PolicyContext
from bench.policies.systems import make_rule
from bench.policies.world import PolicyWorld
from replay.engine import Job
from replay.legs import Leg, ReplayedRequest
from replay.profile import PROFILES
from replay.simworker import MODEL
from replay.split import Split
from replay.traces import Request, chains
from services.router.placement.placement import PlacementRequest
from services.router.state.worker_view import Sent, WorkerView
from shared.contracts.inference import LegKind
from shared.contracts.kv_events import KvEvent, KvEventBatch, KvEventKind, pack_hashes
from shared.contracts.workers import Role

SELECTOR = Path(__file__).with_name("peer_selector.py")


class Mirror:
    """A transcription on the states of a scenario: a world without engines whose legs follow the peer's choices."""

    def __init__(self, policy: str, of: Scenario) -> None:
        self._world = PolicyWorld(Split(both=of.workers), replace(PROFILES["8b"], block_tokens=of.block_tokens))
        self._scenario = of
        context = PolicyContext(
            fleet=self._world.fleet,
            counts=self._world.counts,
            profile=self._world.profile,
            slo_ttft_s=5.0,
            slo_itl_s=0.1,
            seed=0,
        )
        placer = make_rule(policy)(context)
        assert isinstance(placer, Baseline)
        self._policy = placer
        self._ids = list(self._world.workers)
        self._seqs: Counter[int] = Counter()
        self._legs: dict[int, Leg] = {}

    def decided(self, decisions: Iterator[Decision]) -> Iterator[tuple[Decision, set[int], Decision]]:
        """The peer's decision, the workers that the rule holds for equally good, and its own with what it knew."""
        arrivals = [step for step in self._scenario.steps if step.kind is StepKind.ARRIVES]
        requests = [Request(0.0, tuple(step.blocks), step.tokens, 1) for step in arrivals]
        chained = iter(zip(requests, chains(requests), strict=True))
        for step in self._scenario.steps:
            if step.kind is StepKind.ARRIVES:
                replayed = ReplayedRequest(step.number, *next(chained))
                peers, equals, own = next(decisions), *self._arrives(replayed)
                assert peers.number == step.number
                yield peers, equals, own
                self._sent(replayed, peers.worker)
            else:
                self._advances(step)

    def _arrives(self, replayed: ReplayedRequest) -> tuple[set[int], Decision]:
        world, request = self._world, replayed.request
        known = self._known(replayed)
        self._policy.equals = []
        wanted = PlacementRequest(model=MODEL, prompt_tokens=request.input_tokens, hashes=replayed.chain)
        chosen = self._policy.choose(wanted, self._policy.workers(Role.BOTH), world.fleet.index.match(replayed.chain))
        assert isinstance(chosen, WorkerView)
        equals = {self._ids.index(view.record.worker_id) for view in self._policy.equals or [chosen]}
        return equals, msgspec.structs.replace(known, worker=self._ids.index(chosen.record.worker_id))

    def _known(self, replayed: ReplayedRequest) -> Decision:
        world, request, size = self._world, replayed.request, self._scenario.block_tokens
        active = [world.counts.active[worker_id] for worker_id in self._ids]
        matches = world.fleet.index.match(replayed.chain)
        overlaps = [matches.get(worker_id, 0) for worker_id in self._ids]
        return Decision(
            number=replayed.number,
            worker=-1,
            prefill_tokens=[
                one.prefill_tokens + request.input_tokens - size * overlap
                for one, overlap in zip(active, overlaps, strict=True)
            ],
            decode_blocks=[one.blocks_with(replayed.chain, size) for one in active],
            overlap_blocks=overlaps,
            requests=[one.requests for one in active],
        )

    def _sent(self, replayed: ReplayedRequest, worker: int) -> None:
        world, request, size = self._world, replayed.request, self._scenario.block_tokens
        worker_id = self._ids[worker]
        held = world.fleet.index.match(replayed.chain).get(worker_id, 0)
        job = Job(replayed.number, replayed.chain, request.input_tokens, 1)
        uncached = request.input_tokens - held * size
        sent = Sent(0.0, uncached, request.input_tokens)
        leg = Leg(LegKind.AGGREGATED, replayed, world.workers[worker_id], job, sent, uncached)
        self._legs[replayed.number] = leg
        wanted = PlacementRequest(model=MODEL, prompt_tokens=request.input_tokens, hashes=replayed.chain)
        self._policy.routed(wanted, world.fleet.cluster.workers[worker_id])
        world.counts.started(leg)
        self._seqs[worker] += 1
        stored = KvEvent(kind=KvEventKind.STORED, hashes=pack_hashes(replayed.chain))
        epoch = world.workers[worker_id].record.epoch
        batch = KvEventBatch(worker_id=worker_id, epoch=epoch, seq=self._seqs[worker], events=[stored])
        world.fleet.index.apply(batch)

    def _advances(self, step: Step) -> None:
        leg = self._legs[step.number]
        if step.kind is StepKind.COMPUTED:
            self._world.counts.prompt_computed(leg)
        else:
            self._world.counts.ended(self._legs.pop(step.number))


@dataclass(slots=True)
class Comparison:
    """How many decisions are equal, and the classes of those that are not."""

    decisions: int = 0
    equal: int = 0
    tied: int = 0
    """Of the equal ones: several workers were equally good, and the peer chose one of them."""
    differences: Counter[str] = field(default_factory=Counter)
    examples: dict[str, tuple[Decision, Decision]] = field(default_factory=dict)

    def add(self, peers: Decision, equals: set[int], own: Decision) -> None:
        """One decision of both."""
        self.decisions += 1
        if peers.worker in equals:
            self.equal += 1
            self.tied += len(equals) > 1
            return
        kinds = [
            name
            for name in ("overlap_blocks", "prefill_tokens", "decode_blocks")
            if getattr(peers, name) and getattr(peers, name) != getattr(own, name)
        ]
        kind = f"the states differ: {', '.join(kinds)}" if kinds else "the rules differ on the same state"
        if not kinds and own.requests[peers.worker] == own.requests[own.worker] == min(own.requests):
            kind = "another one of the least loaded"
        self.differences[kind] += 1
        self.examples.setdefault(kind, (peers, own))

    def lines(self, title: str) -> Iterator[str]:
        """For people."""
        share = 100 * self.equal / self.decisions
        yield f"{title}: {self.equal} of {self.decisions} decisions equal ({share:.2f} %), {self.tied} of them between ties"
        for kind, count in self.differences.most_common():
            peers, own = self.examples[kind]
            yield f"  {count} times {kind}; first: theirs {peers}, ours {own}"


def compared(policy: str, of: Scenario, decisions: list[Decision]) -> Comparison:
    """All decisions of a scenario."""
    comparison = Comparison()
    for peers, equals, own in Mirror(policy, of).decided(iter(decisions)):
        comparison.add(peers, equals, own)
    return comparison


@dataclass(frozen=True, kw_only=True)
class DecidingPeer(Peer):
    """A package with its own code for a rule of ours."""

    settings: Mapping[str, Sequence[str]]
    """Our policies, and what makes the peer decide by the same parameters."""

    @property
    def installed(self) -> bool:
        """Whether its venv is there."""
        return (self.venv / "installed").exists()

    def decisions(self, policy: str, of: Scenario) -> list[Decision]:
        """The peer's choice for each arrival; the peer must be installed."""
        python = str(self.venv / "bin" / "python")
        if self.package != SELECTOR_PACKAGE:
            return routed([str(self.venv / "bin" / self.package), *self.arguments, *self.settings[policy]], of)
        variables = dict(one.split("=") for one in self.settings[policy])
        done = subprocess.run(
            [python, str(SELECTOR)],
            input=msgspec.json.encode(of),
            stdout=subprocess.PIPE,
            env={**os.environ, **variables},
            check=True,
        )
        return [msgspec.json.decode(line, type=Decision) for line in done.stdout.splitlines() if line[:1] == b"{"]


BALANCE = ["--balance-abs-threshold", "2", "--balance-rel-threshold", "1.1"]
THRESHOLD = ["--cache-threshold", "0.8"]
SELECTOR_PACKAGE = "ai-dynamo-runtime"
DYNAMO = DecidingPeer(
    package=SELECTOR_PACKAGE,
    version="1.6.1",
    arguments=(),
    bootstrap_port=False,
    settings={
        "dynamo": [],
        "dynamo[scale=4]": ["DYN_ROUTER_PREFILL_LOAD_SCALE=4"],
        "dynamo[credit=2]": ["DYN_ROUTER_KV_OVERLAP_SCORE_CREDIT=2"],
        "dynamo[decay=1]": ["DYN_ROUTER_KV_OVERLAP_SCORE_CREDIT_DECAY=1"],
    },
)
SGLANG = DecidingPeer(
    package="sglang-router",
    version="0.3.2",
    arguments=("launch",),
    bootstrap_port=False,
    settings={
        "sglang": [],
        # Ties as in this release; ``sglang`` breaks them as its source does since June 2026.
        "vllm-router": [],
        "vllm-router[abs=2,rel=1.1]": BALANCE,
        "vllm-router[threshold=0.8]": THRESHOLD,
    },
)
VLLM = DecidingPeer(
    package="vllm-router",
    version="0.1.17",
    arguments=(),
    bootstrap_port=False,
    settings={"vllm-router": [], "vllm-router[abs=2,rel=1.1]": BALANCE, "vllm-router[threshold=0.8]": THRESHOLD},
)
PEERS = (DYNAMO, SGLANG, VLLM)


def main() -> None:
    """All comparisons with the peers that are installed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--arrivals", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--install", action="store_true", help="install the peers first, from PyPI below .peers/")
    options = parser.parse_args()
    of = scenario(options.seed, arrivals=options.arrivals)
    for peer in PEERS:
        if options.install:
            peer.install()
        if not peer.installed:
            print(f"{peer.name} is not installed below {peer.venv.parent}; --install does that", flush=True)
            continue
        for policy in peer.settings:
            print(
                *compared(policy, of, peer.decisions(policy, of)).lines(f"{peer.name}, {policy}"), sep="\n", flush=True
            )


if __name__ == "__main__":
    main()
