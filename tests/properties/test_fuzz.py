"""Fuzzed input to an edge or on the bus: no process crashes or hangs, and no state remains.

This is the short form; `make fuzz` sends 100,000 of each kind.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from shared.contracts.channels import CHANNELS
from tests.contracts.examples import ALL_MESSAGES
from tests.nightly.fuzz.body_fuzz import fuzz_bodies
from tests.nightly.fuzz.bus_fuzz import Plan, fuzz_bus
from tests.nightly.fuzz.edge_fuzz import fuzz_edges
from tests.nightly.fuzz.mutation import Mutator
from tests.support.examples import PROFILE

CONNECTIONS, BODIES = (100, 170) if PROFILE == "check" else (300, 500)
PAYLOADS = 50
"""Of each kind."""


@pytest.mark.slow
def test_fuzzed_clients_get_http_responses_and_leave_no_state():
    campaigns = fuzz_edges(CONNECTIONS, 1, lambda _name, _sent: None)

    assert [finding for campaign in campaigns for finding in campaign.findings] == []
    assert [campaign.name for campaign in campaigns] == ["HTTP of the router", "HTTP of the collector"]
    assert all(0 < campaign.read < campaign.heard <= campaign.sent == CONNECTIONS for campaign in campaigns)


@pytest.mark.slow
def test_fuzzed_bodies_are_read_within_their_limits_or_refused():
    campaign = fuzz_bodies(BODIES, 1, lambda _name, _sent: None)

    assert campaign.findings == []
    assert 0 < campaign.heard < campaign.sent == BODIES
    assert campaign.read > 0


def test_no_fuzzed_message_ends_a_service(tmp_path: Path):
    campaigns = fuzz_bus(tmp_path, Plan(PAYLOADS))

    assert [finding for campaign in campaigns for finding in campaign.findings] == []
    assert {campaign.name.split()[0] for campaign in campaigns} == set(CHANNELS)
    assert all(0 < campaign.read < campaign.sent for campaign in campaigns)


@pytest.mark.parametrize("message", ALL_MESSAGES, ids=lambda message: message.__name__)
def test_the_same_seed_makes_the_same_payloads(message: type):
    def made(seed: int) -> list[bytes]:
        mutator = Mutator(message, seed)
        return [mutator.payload({"worker_id": ["w1"]})[0] for _ in range(20)]

    assert made(1) == made(1) != made(2)
