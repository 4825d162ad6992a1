"""Whatever requests come and whatever the cache loses: chains are bounded, held, and none begins another."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from connector.holder.hot_chains import HotChains
from shared.contracts.kv_exchange import unpack_full_hashes

CHAINS_MAX, BLOCKS_MAX = 5, 40

branches = st.lists(st.sampled_from("ab"), min_size=0, max_size=12)
"""A path in a small tree: two of them often begin alike, and often one begins the other."""
requests = st.lists(st.tuples(branches, st.floats(0.0, 600.0)), max_size=40)


def chain(path: list[str]) -> list[bytes]:
    """A block's name tells its whole path, as a chained hash does."""
    return ["".join(path[: end + 1]).encode().ljust(32, b".") for end in range(len(path))]


@given(requests, st.integers(0, 12), st.integers(1, 8))
def test_chains_are_bounded_cached_and_no_prefixes_of_others(uses, held_blocks, count):
    chains = HotChains(lambda hashes: min(len(hashes), held_blocks), chains_max=CHAINS_MAX, blocks_max=BLOCKS_MAX)
    now = 0.0
    for path, later_s in uses:
        now += later_s
        chains.note(chain(path), now)
        assert len(chains) <= CHAINS_MAX
        assert chains.blocks <= BLOCKS_MAX

    answer = [unpack_full_hashes(one.hashes) for one in chains.hottest(count, now)]

    known = [chain(path)[:held_blocks] for path, _later_s in uses]
    assert len(answer) <= count
    assert all(one in known for one in answer)
    for one in answer:
        assert not [other for other in answer if other is not one and other[: len(one)] == one]


@given(requests)
def test_each_prompt_and_each_use_counts_once(uses):
    chains = HotChains(len)
    for path, _ in uses:
        chains.note(chain(path), 0.0)

    whole = {tuple(chain(path)) for path, _ in uses if path}
    longest = [one for one in whole if not any(other != one and other[: len(one)] == one for other in whole)]
    answer = chains.hottest(1000, 0.0)

    assert sorted(tuple(unpack_full_hashes(one.hashes)) for one in answer) == sorted(longest)
    assert sum(one.uses for one in answer) <= sum(bool(path) for path, _ in uses)
