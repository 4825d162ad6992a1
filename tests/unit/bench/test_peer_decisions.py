"""Transcribed rules decide as the systems' own code did.

``peer_decisions.json`` holds choices of the packages that ``bench.peer_decisions`` names; it is made again with
``python -m tests.unit.bench.test_peer_decisions`` after ``python -m bench.peer_decisions --install``.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from bench.peer_decisions import DYNAMO, PEERS, Comparison, DecidingPeer, compared
from bench.peer_scenario import Decision, scenario

RECORDED = Path(__file__).with_name("peer_decisions.json")
SEED, ARRIVALS = 3, 300
CASES = [pytest.param(peer, policy, id=f"{peer.package}: {policy}") for peer in PEERS for policy in peer.settings]
TIES = "another one of the least loaded"


class Recorded(msgspec.Struct, frozen=True, kw_only=True):
    """The chosen workers by peer and policy, in the order of arrivals."""

    seed: int
    arrivals: int
    workers: dict[str, dict[str, list[int]]]


def recorded(peer: DecidingPeer, policy: str, rule: str) -> Comparison:
    of = msgspec.json.decode(RECORDED.read_bytes(), type=Recorded)
    chosen = of.workers[peer.name][policy]
    decisions = [Decision(number=number, worker=worker) for number, worker in enumerate(chosen)]
    assert len(decisions) == of.arrivals
    return compared(rule, scenario(of.seed, arrivals=of.arrivals), decisions)


@pytest.mark.parametrize(("peer", "policy"), CASES)
def test_a_transcription_decides_as_the_systems_code_did(peer, policy):
    comparison = recorded(peer, policy, policy)

    if policy == "sglang":  # it breaks ties as the source does since that release
        assert set(comparison.differences) == {TIES}
        assert comparison.equal > 0.95 * comparison.decisions
    else:
        assert comparison.differences == {}
        assert comparison.equal == comparison.decisions


def test_another_rule_decides_differently_on_the_same_states():
    comparison = recorded(DYNAMO, "dynamo", "dynamo[scale=4]")

    assert comparison.equal < 0.95 * comparison.decisions
    assert comparison.differences["the rules differ on the same state"] > 0


def record() -> None:
    of = scenario(SEED, arrivals=ARRIVALS)
    workers = {
        peer.name: {policy: [one.worker for one in peer.decisions(policy, of)] for policy in peer.settings}
        for peer in PEERS
    }
    RECORDED.write_bytes(msgspec.json.encode(Recorded(seed=SEED, arrivals=ARRIVALS, workers=workers)) + b"\n")


if __name__ == "__main__":
    record()
