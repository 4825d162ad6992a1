"""Twenty engines, thousands of requests, and everything that goes wrong: right tokens or a reason, and nothing pinned."""

from __future__ import annotations

import pytest

from tests.scenarios.kv_traffic import Traffic, lossy

WORKERS = 20


def troubled(draw):
    return lossy(draw, lost=0.03, late=0.05, twice=0.03, spoilt=0.05)


@pytest.mark.parametrize("seed", range(2))
def test_where_nothing_goes_wrong_hardly_a_token_is_computed_twice(seed):
    traffic = Traffic(seed, workers=WORKERS)
    traffic.send(1000, per_s=100.0)
    traffic.run()

    ends = traffic.check_answers()
    traffic.check_at_rest()
    assert set(ends) == {"length", "cache_threshold"}
    assert traffic.proofs["fetched_tokens"] > traffic.proofs["recomputed_tokens"] / 4
    handed = [request for request in traffic.requests if request.kind in ("handed over", "streamed")]
    proofs = [request.legs[-1][1].account.proof for request in handed]
    assert sum(proof.recomputed_tokens for proof in proofs) < 5 * len(proofs)


@pytest.mark.parametrize("seed", range(4))
def test_whatever_goes_wrong_tokens_are_right_and_nothing_stays_pinned(seed):
    traffic = Traffic(seed, workers=WORKERS, carry=troubled)
    traffic.send(1500, per_s=100.0, aborted=0.2)
    traffic.kill_now_and_then(12, every_s=1.2)
    traffic.run()

    ends = traffic.check_answers()
    traffic.check_at_rest()
    assert traffic.kills == 12
    assert ends["length"] > 1000
    assert traffic.proofs["fetched_tokens"] > 10_000
