"""Reports of several ranks are combined into one."""

from __future__ import annotations

from connector.messages import Connected, RankAggregation, ReadPart, Results

PEER = ("holder", 1)


def part(failure: str = "") -> Results:
    return Results(parts=[ReadPart(1, 0, 4, 0 if failure else 100, 1.0, 2.0, failure)])


def test_a_part_is_final_when_all_ranks_have_it():
    aggregation = RankAggregation(2)

    assert not aggregation.add(part())
    (together,) = aggregation.add(part()).parts
    assert (together.bytes, together.failure) == (200, "")


def test_a_failed_share_fails_the_part_after_the_last_report():
    aggregation = RankAggregation(2)

    assert not aggregation.add(part("the read failed"))
    assert aggregation.add(part()).parts[0].failure == "the read failed"


def test_a_peer_is_connected_when_all_ranks_are():
    aggregation = RankAggregation(2)

    assert not aggregation.add(Results(connected=[Connected(PEER, 0.1)]))
    assert aggregation.add(Results(connected=[Connected(PEER, 0.2)])).connected == [Connected(PEER, 0.2)]


def test_a_peer_that_one_rank_lost_is_lost_at_once():
    aggregation = RankAggregation(2)

    assert aggregation.add(Results(connected=[Connected(PEER, 9.0, "cut")])).connected == [Connected(PEER, 9.0, "cut")]

    assert not aggregation.add(Results(connected=[Connected(PEER, 0.1)]))
    assert aggregation.add(Results(connected=[Connected(PEER, 0.1)])).connected[0].failure == ""
