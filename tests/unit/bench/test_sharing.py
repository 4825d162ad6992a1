"""The benchmark of prompts that begin alike: what its loads share, and that placement gains by it."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from bench.policies import BATON_DEFAULT
from bench.seeds.sharing import COUNTED_WHOLE, PREFILL_HEAVY, ROUND_ROBIN, middle, requests_of, simulate

FEW = replace(PREFILL_HEAVY, asked=8)


@pytest.mark.parametrize("share", [0.0, 0.5, 0.9])
def test_prompts_share_what_they_should(share: float):
    requests = requests_of(FEW, share, seed=1)
    shared = FEW.shared_tokens(share) // 32

    assert len({request.blocks for request in requests}) == len(requests) == FEW.clients * FEW.asked
    assert len({request.blocks[:shared] for request in requests}) == (FEW.groups if share else 1)
    assert all(a.blocks[shared] != b.blocks[shared] for a, b in pairwise(requests))


def test_the_first_and_last_answers_do_not_count():
    assert middle([*range(100), 1000.0]) == (15, 85, 1.0)


@pytest.mark.slow
def test_placement_by_cache_gains_where_prompts_begin_alike():
    found = {name: simulate(FEW, 0.9, name) for name in (ROUND_ROBIN, COUNTED_WHOLE, BATON_DEFAULT)}
    per_s = {name: one.requests_per_s for name, one in found.items()}

    assert per_s[BATON_DEFAULT] > 1.3 * per_s[ROUND_ROBIN]
    assert per_s[BATON_DEFAULT] > 1.05 * per_s[COUNTED_WHOLE]
    assert found[BATON_DEFAULT].computed < found[ROUND_ROBIN].computed
    assert max(found[BATON_DEFAULT].kv_used) > 0.9
