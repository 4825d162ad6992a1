"""Twenty engines, thousands of requests, and everything that goes wrong: right tokens or a reason, and nothing pinned."""

from __future__ import annotations

import msgspec
import pytest

from shared.contracts.kv_exchange import KvGrant
from tests.scenarios.kv_traffic import Traffic, completion, lossy
from tests.unit.worker.simulated.fleet import carried_well

WORKERS = 20
SCARCE = {"kv_blocks": 64, "max_model_len": 256, "sim_transfer_bytes_per_s": 4e6}
"""Memory for two or three prompts, and reads that take as long as computing: blocks change hands all the time."""


def troubled(draw):
    return lossy(draw, lost=0.03, late=0.05, twice=0.03, spoilt=0.05, away=0.001)


def test_where_nothing_goes_wrong_hardly_a_token_is_computed_twice():
    traffic = Traffic(0, workers=WORKERS)
    traffic.send(1000, per_s=100.0)
    traffic.run()

    ends = traffic.check_answers()
    traffic.check_at_rest()
    assert set(ends) == {"length", "cache_threshold"}
    assert traffic.transfer_reports["fetched_tokens"] > traffic.transfer_reports["recomputed_tokens"] / 4
    handed = [request for request in traffic.requests if request.kind in ("handed over", "streamed")]
    transfer_reports = [request.legs[-1][1].account.transfer_report for request in handed]
    assert sum(transfer_report.recomputed_tokens for transfer_report in transfer_reports) < 5 * len(transfer_reports)


@pytest.mark.parametrize("seed", range(3))
def test_whatever_goes_wrong_tokens_are_right_and_nothing_stays_pinned(seed):
    traffic = Traffic(seed, workers=WORKERS, carry=troubled)
    traffic.send(1500, per_s=100.0, aborted=0.2)
    traffic.kill_now_and_then(12, every_s=1.2)
    traffic.prefetch_now_and_then(100, every_s=0.14)
    traffic.run()

    ends = traffic.check_answers()
    traffic.check_at_rest()
    assert traffic.kills == 12
    assert ends["length"] > 1000
    assert traffic.transfer_reports["fetched_tokens"] > 10_000
    assert sum(fetched.fetched for member in traffic.alive() for fetched in member.fetched.values()) > 100


@pytest.mark.parametrize("seed", range(2))
def test_where_memory_is_scarce_and_leases_are_short_recycled_blocks_are_never_used(seed):
    traffic = Traffic(seed, workers=6, carry=troubled, kv_lease_s=0.8, **SCARCE)
    traffic.send(1200, per_s=60.0, aborted=0.2)
    traffic.kill_now_and_then(4, every_s=4.0)
    traffic.run()

    ends = traffic.check_answers()
    traffic.check_at_rest()
    assert ends["length"] > 400
    assert traffic.transfer_reports["preemptions"] > 0
    assert sum(member.core.exchange.holder.counts.expired_total for member in traffic.alive()) > 0


def test_a_holder_that_keeps_blocks_shorter_than_it_promises_is_found_out_by_the_tokens():
    """What shows that the tests above can fail."""
    traffic = Traffic(0, workers=6, carry=lambda _draw: promising_too_much, kv_lease_s=0.3, **SCARCE)
    traffic.send(800, per_s=60.0)
    traffic.run()

    answered = [request for request in traffic.requests if request.end == "length"]
    wrong = [one for one in answered if completion(one.legs[-1][1]) != traffic.right_tokens(one)]
    assert wrong


def promising_too_much(message):
    if isinstance(message, KvGrant):
        message = msgspec.structs.replace(message, until_s=message.until_s + 100.0)
    return carried_well(message)
