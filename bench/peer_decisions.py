"""Do the replay's transcriptions decide as the systems themselves do? ``python -m bench.peer_decisions``.

A random history of arrivals, first tokens and ends is given to the other system's own code, and then, with the other
system's choices, to the transcription, so that both decide on the same states. Printed: the share of equal decisions, and
each class of difference with an example. ``--dynamo PYTHON`` names an interpreter with ``pip install ai-dynamo-runtime``,
``--sglang PYTHON`` and ``--vllm PYTHON`` ones with sglang-router and vllm-router.
"""

from __future__ import annotations

import argparse
import os
import subprocess
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from bench.peer_scenario import Decision, Scenario, Step, StepKind, scenario
from replay.engine import Job
from replay.legs import Leg, ReplayedRequest
from replay.policies.base import Baseline, PolicyContext
from replay.policies.systems import make_rule
from replay.profile import PROFILES
from replay.simworker import MODEL
from replay.traces import Request, chains
from replay.world import Shape, World
from services.router.placement.placement import Placement, PlacementRequest
from services.router.state.worker_view import Sent
from shared.contracts.inference import LegKind
from shared.contracts.kv_events import KvEvent, KvEventBatch, KvEventKind, pack_hashes

SELECTOR = Path(__file__).with_name("peer_selector.py")
SETTINGS = {
    "dynamo": {},
    "dynamo[scale=4]": {"DYN_ROUTER_PREFILL_LOAD_SCALE": "4"},
    "dynamo[credit=2]": {"DYN_ROUTER_KV_OVERLAP_SCORE_CREDIT": "2"},
    "dynamo[decay=1]": {"DYN_ROUTER_KV_OVERLAP_SCORE_CREDIT_DECAY": "1"},
}
"""Policies and the variables with which Dynamo's router decides by the same parameters."""


class Mirror:
    """A transcription on the states of a scenario: a world without engines whose legs follow the peer's choices."""

    def __init__(self, policy: str, of: Scenario) -> None:
        self._world = World(Shape(both=of.workers), replace(PROFILES["8b"], block_tokens=of.block_tokens))
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
        world.counts.arrives(replayed)
        known = self._known(replayed)
        self._policy.equals = []
        wanted = PlacementRequest(model=MODEL, prompt_tokens=request.input_tokens, hashes=replayed.chain)
        placement = self._policy.place(wanted, 0.0)
        assert isinstance(placement, Placement)
        chosen = self._index(placement)
        equals = {self._ids.index(view.record.worker_id) for view in self._policy.equals}
        return equals or {chosen}, msgspec.structs.replace(known, worker=chosen)

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
        )

    def _index(self, placement: Placement) -> int:
        return self._ids.index(placement.decode.record.worker_id)

    def _sent(self, replayed: ReplayedRequest, worker: int) -> None:
        world, request, size = self._world, replayed.request, self._scenario.block_tokens
        worker_id = self._ids[worker]
        held = world.fleet.index.match(replayed.chain).get(worker_id, 0)
        job = Job(replayed.number, replayed.chain, request.input_tokens, 1)
        uncached = request.input_tokens - held * size
        sent = Sent(0.0, uncached, request.input_tokens)
        leg = Leg(LegKind.AGGREGATED, replayed, world.workers[worker_id], job, sent, uncached)
        self._legs[replayed.number] = leg
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
        self.differences[kind] += 1
        self.examples.setdefault(kind, (peers, own))

    def lines(self, policy: str) -> Iterator[str]:
        """For people."""
        share = 100 * self.equal / self.decisions
        yield f"{policy}: {self.equal} of {self.decisions} decisions equal ({share:.2f} %), {self.tied} of them between ties"
        for kind, count in self.differences.most_common():
            peers, own = self.examples[kind]
            yield f"  {count} times {kind}; first: theirs {peers}, ours {own}"


def compared(policy: str, of: Scenario, decisions: list[Decision]) -> Comparison:
    """All decisions of a scenario."""
    comparison = Comparison()
    for peers, equals, own in Mirror(policy, of).decided(iter(decisions)):
        comparison.add(peers, equals, own)
    return comparison


def dynamo(python: str, of: Scenario, variables: Mapping[str, str]) -> list[Decision]:
    """Decisions of Dynamo's selector."""
    done = subprocess.run(
        [python, str(SELECTOR)],
        input=msgspec.json.encode(of),
        stdout=subprocess.PIPE,
        env={**os.environ, **variables},
        check=True,
    )
    return [msgspec.json.decode(line, type=Decision) for line in done.stdout.splitlines() if line.startswith(b"{")]


def main() -> None:
    """All comparisons for which an interpreter is named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--arrivals", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--dynamo", default="", help="an interpreter with ai-dynamo-runtime")
    options = parser.parse_args()
    of = scenario(options.seed, arrivals=options.arrivals)
    if options.dynamo:
        for policy, variables in SETTINGS.items():
            print(*compared(policy, of, dynamo(options.dynamo, of, variables)).lines(policy), sep="\n", flush=True)


if __name__ == "__main__":
    main()
