"""Under vLLM's own schedulers, every block that a reader relies on holds what its prompt has there, from the grant to the
end of the lease, and in the end no block is pinned: for models with any KV cache groups, with steps in flight,
preemption, eviction and copies on write.
"""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given

from tests.support.examples import SEEDS, seeded
from tests.unit.connector.lending import LAYOUTS, History

EVENTS = 80


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("model")


@pytest.mark.parametrize("layout", LAYOUTS)
@seeded(100)
@given(seed=SEEDS)
def test_lent_blocks_hold_what_was_promised_until_their_lease_ends(folder, layout, seed):
    History(folder, LAYOUTS[layout], seed).run(EVENTS)


def seen_in(folder, layout: str, histories: int) -> Counter[str]:
    seen = Counter[str]()
    for seed in range(histories):
        history = History(folder, LAYOUTS[layout], seed)
        history.run(EVENTS)
        seen += history.seen
    return seen


def test_the_histories_lend_ahead_offer_and_preempt(folder):
    seen = seen_in(folder, "three states", 60)

    assert min(seen["full attention ahead"], seen["boundary"], seen["offer"]) > 50
    assert seen["preemptions"]


def test_the_histories_copy_states_and_lend_them_inside_blocks(folder):
    seen = seen_in(folder, "states inside blocks", 20)

    assert min(seen["inside a block"], seen["copies"]) > 50


def test_a_state_that_is_not_cached_is_not_lent(folder):
    seen = seen_in(folder, "state without caching", 20)

    assert not seen - Counter(preemptions=seen["preemptions"])
