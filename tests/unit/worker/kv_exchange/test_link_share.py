"""Prefetches get a share of the time that requests leave, whatever they take."""

from __future__ import annotations

import math

import pytest

from services.worker.kv_exchange.link_share import (
    BLOCKS_ASSUMED,
    BURST_S,
    MEMORY_S,
    PREFETCH_SHARE_MAX,
    USES_MEMORY_S,
    LinkShare,
    UsedShare,
)

HOUR_S = 3600.0


def run(link: LinkShare, *, prefetch_s: float, requests_share: float, until_s: float = HOUR_S) -> float:
    """Prefetch whenever that is allowed; returns the time that prefetches took."""
    now = taken_s = 0.0
    while now < until_s:
        link.observe(requests_share * now, now)
        if link.wait_s() > 0.0:
            now += 0.1
            continue
        aside_s = link.begin(1000)
        now += prefetch_s
        link.observe(requests_share * now, now)
        link.end(aside_s, 1000, prefetch_s)
        taken_s += prefetch_s
    return taken_s


@pytest.mark.parametrize("prefetch_s", [0.05, 1.0, 20.0])
@pytest.mark.parametrize("requests_share", [0.0, 0.5, 0.9])
def test_prefetches_take_their_share_and_no_more(prefetch_s: float, requests_share: float):
    link = LinkShare(0.0)

    taken_s = run(link, prefetch_s=prefetch_s, requests_share=requests_share)

    share = PREFETCH_SHARE_MAX * (1.0 - requests_share)
    started_s = MEMORY_S * PREFETCH_SHARE_MAX  # The share of requests is not learned yet.
    assert taken_s <= share * HOUR_S + BURST_S + started_s + 2 * prefetch_s
    assert taken_s >= 0.8 * share * HOUR_S


def test_nothing_is_prefetched_while_requests_read_all_the_time():
    link = LinkShare(0.0)
    for second in range(1, 300):
        link.observe(2.0 * second, float(second))

    assert link.wait_s() == math.inf


def test_a_pause_saves_no_more_than_a_burst():
    link = LinkShare(0.0)
    link.observe(0.0, HOUR_S)

    link.end(link.begin(10), 10, BURST_S)

    assert link.wait_s() > 0.0


def test_what_tokens_take_is_set_aside_so_that_prefetches_side_by_side_count():
    link = LinkShare(0.0)
    first = link.begin(100)
    assert link.wait_s() == math.inf, "the first one shows what a token takes"
    link.end(first, 100, 0.1)
    link.observe(0.0, HOUR_S)

    begun = 0
    while not link.wait_s():
        link.begin(300)
        begun += 1

    assert begun == math.ceil(BURST_S / 0.3)


def test_a_clock_that_stands_still_changes_nothing():
    link = LinkShare(5.0)
    link.observe(100.0, 5.0)

    assert (link.requests_share, link.wait_s()) == (0.0, 0.0)


def test_the_use_of_prefetches_is_learned_and_forgotten():
    uses = UsedShare(0.0)
    assert uses.share == 1.0

    uses.observe(0, 3 * int(BLOCKS_ASSUMED), 1.0)
    assert uses.share == pytest.approx(0.25)
    uses.observe(3 * int(BLOCKS_ASSUMED), 3 * int(BLOCKS_ASSUMED), 2.0)
    assert uses.share == pytest.approx(4 / 7, abs=0.01)
    uses.observe(3 * int(BLOCKS_ASSUMED), 3 * int(BLOCKS_ASSUMED), 2.0 + 10 * USES_MEMORY_S)
    assert uses.share == pytest.approx(1.0, abs=0.001)


def test_an_engine_that_restarts_counts_from_zero():
    uses = UsedShare(0.0)
    uses.observe(100, 100, 1.0)
    before = uses.share

    uses.observe(0, 0, 1.0)

    assert uses.share == before
