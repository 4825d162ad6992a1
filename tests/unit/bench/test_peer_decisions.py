"""Transcribed rules decide as the systems' own code did, and does where it is installed.

``dynamo_decisions.json`` holds choices of ai-dynamo-runtime 1.6.1; it is made again with
``python -m tests.unit.bench.test_peer_decisions PYTHON``.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import msgspec
import pytest

from bench.peer_decisions import SETTINGS, compared, dynamo
from bench.peer_scenario import Decision, scenario

RECORDED = Path(__file__).with_name("dynamo_decisions.json")
SEED, ARRIVALS = 3, 300
DYNAMO_PYTHON = os.environ.get("DYNAMO_PYTHON", "")


class Recorded(msgspec.Struct, frozen=True, kw_only=True):
    """The chosen workers by policy, in the order of arrivals."""

    source: str
    seed: int
    arrivals: int
    workers: dict[str, list[int]]


def recorded() -> Recorded:
    return msgspec.json.decode(RECORDED.read_bytes(), type=Recorded)


@pytest.mark.parametrize("policy", SETTINGS)
def test_dynamos_transcription_decides_as_dynamos_selector_did(policy):
    of = recorded()
    decisions = [Decision(number=number, worker=worker) for number, worker in enumerate(of.workers[policy])]
    comparison = compared(policy, scenario(of.seed, arrivals=of.arrivals), decisions)

    assert comparison.differences == {}
    assert comparison.equal == of.arrivals


def test_another_rule_decides_differently_on_the_same_states():
    of = recorded()
    decisions = [Decision(number=number, worker=worker) for number, worker in enumerate(of.workers["dynamo"])]
    comparison = compared("dynamo[scale=4]", scenario(of.seed, arrivals=of.arrivals), decisions)

    assert comparison.equal < 0.95 * comparison.decisions
    assert set(comparison.differences) == {"the rules differ on the same state"}


@pytest.mark.skipif(not DYNAMO_PYTHON, reason="DYNAMO_PYTHON names no interpreter with ai-dynamo-runtime")
@pytest.mark.parametrize("policy", SETTINGS)
def test_dynamos_transcription_decides_as_the_installed_selector(policy):
    of = scenario(4, arrivals=500)
    comparison = compared(policy, of, dynamo(DYNAMO_PYTHON, of, SETTINGS[policy]))

    # Now and then a first token takes effect in its core only after the next request was placed.
    assert set(comparison.differences) <= {"the states differ: prefill_tokens"}
    assert comparison.equal >= 495


def record(python: str) -> None:
    of = scenario(SEED, arrivals=ARRIVALS)
    workers = {policy: [one.worker for one in dynamo(python, of, given)] for policy, given in SETTINGS.items()}
    made = Recorded(source="ai-dynamo-runtime 1.6.1", seed=SEED, arrivals=ARRIVALS, workers=workers)
    RECORDED.write_bytes(msgspec.json.encode(made) + b"\n")


if __name__ == "__main__":
    record(sys.argv[1])
