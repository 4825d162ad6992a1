"""Transcribed rules decide as the systems' own code does, where it is installed."""

from __future__ import annotations

import pytest

from bench.peer_decisions import DYNAMO, PEERS, compared
from bench.peer_scenario import scenario

CASES = [pytest.param(peer, policy, id=f"{peer.package}: {policy}") for peer in PEERS for policy in peer.settings]
ARRIVALS = 200


@pytest.mark.parametrize(("peer", "policy"), CASES)
def test_a_transcription_decides_as_the_installed_package(peer, policy):
    if not peer.installed:
        pytest.skip(f"{peer.name} is not installed: python -m bench.peer_decisions --install")
    of = scenario(4, arrivals=ARRIVALS)
    comparison = compared(policy, of, peer.decisions(policy, of))

    explained = set()
    if peer is DYNAMO:  # now and then a first token takes effect in its core only after the next request was placed
        explained = {"the states differ: prefill_tokens"}
    if policy == "sglang":  # it breaks ties as the source does since that release
        explained = {"another one of the least loaded"}
    assert set(comparison.differences) <= explained
    assert comparison.equal >= 0.95 * ARRIVALS
