"""Blocks of a prompt that is still being computed are granted as they become ready."""

from __future__ import annotations

import pytest

from connector.holder.holder import ENDED_LEGS_NOTED_MAX, FULL_S_MAX
from connector.holder.leases import FOLLOWED_MAX
from shared.contracts.kv_exchange import NoGrant
from tests.support.kv_messages import blocks_of, first_of
from tests.unit.connector.holding import BLOCK_TOKENS, Holding, chain, lease_request, release


class Prefill:
    """A request whose prompt is computed in chunks; each chunk is scheduled first and computed later."""

    def __init__(self, holding: Holding, hashes: list[bytes]) -> None:
        self.holding, self.hashes = holding, hashes
        self.blocks: list = []

    def schedule(self, count: int):
        first = len(self.blocks)
        self.blocks += self.holding.pool.get_new_blocks(count)
        return self.holding.schedule(self.hashes, self.blocks, first)

    def compute(self, count: int) -> None:
        self.holding.holder.computed(self.schedule(count))

    @property
    def ids(self) -> list[int]:
        return [block.block_id for block in self.blocks]


@pytest.fixture
def holding():
    return Holding()


def test_a_prompt_is_granted_chunk_by_chunk_while_it_is_computed(holding):
    hashes = chain(6)
    prefill = Prefill(holding, hashes)
    first = holding.holder.lease(lease_request(hashes, follow_s=30.0))
    assert (first.final, first.groups, first.reason, first.lease_id) == (False, [], None, "ask-1")

    prefill.compute(2)
    (second,) = holding.holder.advance()
    prefill.compute(3)
    (third,) = holding.holder.advance()
    prefill.compute(1)
    (last,) = holding.holder.advance()

    assert [(first_of(one), blocks_of(one), one.final) for one in (second, third, last)] == [
        (0, prefill.ids[:2], False),
        (2, prefill.ids[2:5], False),
        (5, prefill.ids[5:], True),
    ]
    assert {one.lease_id for one in (second, third, last)} == {"ask-1"}
    assert [one.last_hash for one in (second, third, last)] == [hashes[1], hashes[4], hashes[5]]
    assert (last.reason, holding.holder.has_followed, holding.holder.advance()) == (None, False, [])


def test_a_chunk_is_granted_as_soon_as_it_is_computed(holding):
    hashes = chain(4)
    prefill = Prefill(holding, hashes)
    holding.holder.lease(lease_request(hashes, follow_s=30.0))
    first, second = prefill.schedule(2), prefill.schedule(2)
    assert holding.holder.advance() == []

    holding.holder.computed(first)
    (grant,) = holding.holder.advance()
    assert blocks_of(grant) == prefill.ids[:2]

    holding.holder.computed(second)
    (grant,) = holding.holder.advance()
    assert blocks_of(grant) == prefill.ids[2:]


def test_cached_blocks_are_granted_at_once_and_the_rest_followed(holding):
    hashes = chain(3)
    held = holding.hold(hashes[:2])

    grant = holding.holder.lease(lease_request(hashes, follow_s=30.0))

    assert (blocks_of(grant), grant.final, holding.holder.has_followed) == (held, False, True)


def test_one_release_frees_all_grants_and_ends_following(holding):
    hashes = chain(4)
    prefill = Prefill(holding, hashes)
    holding.holder.lease(lease_request(hashes, follow_s=30.0))
    for _ in range(3):
        prefill.compute(1)
        holding.holder.advance()
    holding.end(prefill.blocks)

    holding.holder.release(release("ask-1"))
    prefill = Prefill(holding, hashes)
    prefill.compute(4)

    assert holding.holder.advance() == []
    holding.end(prefill.blocks)
    assert holding.free == holding.free_at_first


def test_following_without_progress_ends_at_its_deadline(holding):
    holding.holder.lease(lease_request(chain(2), follow_s=3.0))
    assert holding.holder.counts.next_expiry_s == 103.0

    holding.now = 102.9
    assert holding.holder.advance() == []
    holding.now = 103.0
    (last,) = holding.holder.advance()

    assert (last.final, last.reason, last.groups) == (True, NoGrant.FOLLOW_OVER, [])
    assert (holding.holder.counts.leases, holding.holder.counts.refused_total) == (0, 1)


def test_nothing_is_granted_after_the_follow_deadline(holding):
    holding.holder.lease(lease_request(chain(2), follow_s=3.0))
    holding.hold(chain(2))

    holding.now = 200.0
    (last,) = holding.holder.advance()

    assert (last.reason, holding.free) == (NoGrant.FOLLOW_OVER, holding.free_at_first)


def test_each_grant_ends_at_its_own_expiry(holding):
    hashes = chain(4)
    prefill = Prefill(holding, hashes)
    holding.holder.lease(lease_request(hashes, hold_s=5.0, follow_s=30.0))
    prefill.compute(2)
    holding.holder.advance()
    holding.now = 104.0
    prefill.compute(2)
    holding.holder.advance()
    holding.end(prefill.blocks)

    holding.now = 105.0
    holding.holder.advance()
    assert holding.holder.counts.pinned_blocks == 2

    holding.now = 109.0
    holding.holder.advance()
    assert holding.free == holding.free_at_first
    assert (holding.holder.counts.granted_total, holding.holder.counts.expired_total) == (1, 1)


def test_a_prompt_queued_longer_than_a_lease_is_still_followed(holding):
    hashes = chain(4)
    holding.hold(hashes[:1])
    holding.holder.lease(lease_request(hashes, hold_s=5.0, follow_s=30.0))
    holding.now = 120.0
    holding.holder.advance()
    prefill = Prefill(holding, hashes)

    prefill.compute(4)
    (last,) = holding.holder.advance()

    assert (first_of(last), blocks_of(last), last.final) == (1, prefill.ids[1:], True)


def test_full_memory_delays_grants_of_a_followed_prompt():
    holding = Holding(blocks=20, lease_share_max=0.3)
    hashes = chain(4)
    holding.hold(chain(6, "another prompt"))
    holding.holder.lease(lease_request(chain(6, "another prompt"), "ask-0"))
    prefill = Prefill(holding, hashes)
    prefill.compute(4)

    first = holding.holder.lease(lease_request(hashes, follow_s=30.0))
    assert (first.final, first.groups) == (False, [])
    assert holding.holder.advance() == []

    holding.holder.release(release("ask-0"))
    (last,) = holding.holder.advance()
    assert (blocks_of(last), last.final) == (prefill.ids, True)


def test_following_ends_soon_when_the_lease_share_is_full():
    holding = Holding(blocks=20, lease_share_max=0.1)
    holding.hold(chain(4))
    holding.holder.lease(lease_request(chain(4), hold_s=30.0, follow_s=30.0))
    assert holding.holder.advance() == []

    holding.now += FULL_S_MAX
    (last,) = holding.holder.advance()

    assert (last.reason, last.groups, last.final) == (NoGrant.FULL, [], True)
    assert not holding.holder.has_followed


def test_the_last_grant_reports_the_holders_cached_tokens(holding):
    hashes = chain(3)
    prefill = Prefill(holding, hashes)
    holding.holder.lease(lease_request(hashes, follow_s=30.0, leg_id="leg"))
    holding.holder.note_prompt(hashes, 3 * BLOCK_TOKENS, 2 * BLOCK_TOKENS, "leg")
    prefill.compute(2)
    (early,) = holding.holder.advance()
    prefill.compute(1)
    (last,) = holding.holder.advance()

    assert (early.prefill_cached_tokens, last.prefill_cached_tokens) == (0, 2 * BLOCK_TOKENS)


@pytest.mark.parametrize("named", ["leg", ""])
def test_a_late_follower_also_learns_the_cached_tokens(holding, named):
    holding.holder.note_prompt(chain(3), 3 * BLOCK_TOKENS, BLOCK_TOKENS, "leg")
    holding.hold(chain(3))

    grant = holding.holder.lease(lease_request(chain(3), follow_s=30.0, leg_id=named))

    assert (grant.final, grant.prefill_cached_tokens) == (True, BLOCK_TOKENS)


def test_what_is_granted_before_its_leg_is_scheduled_says_so(holding):
    holding.holder.note_prompt(chain(3), 3 * BLOCK_TOKENS, 0, "an earlier leg with this prompt")
    holding.hold(chain(3))

    grant = holding.holder.lease(lease_request(chain(3), follow_s=30.0, leg_id="leg"))

    assert (grant.final, grant.prefill_cached_tokens) == (True, -1)


def test_followers_are_notified_when_the_engine_ends(holding):
    hashes = chain(4)
    prefill = Prefill(holding, hashes)
    holding.holder.lease(lease_request(hashes, follow_s=30.0))
    prefill.compute(2)
    holding.holder.advance()

    holding.holder.release_all()
    prefill.compute(2)
    (last,) = holding.holder.advance()

    assert (last.final, last.reason, last.groups) == (True, NoGrant.DRAINING, [])
    holding.end(prefill.blocks)
    assert (holding.free, holding.holder.counts.leases) == (holding.free_at_first, 0)


def test_followers_beyond_the_maximum_get_only_cached_blocks(holding):
    hashes = chain(3)
    holding.hold(hashes[:1])
    grants = [
        holding.holder.lease(lease_request(hashes, f"ask-{number}", follow_s=30.0))
        for number in range(FOLLOWED_MAX + 1)
    ]

    assert [one.final for one in grants] == [False] * FOLLOWED_MAX + [True]
    assert (len(blocks_of(grants[-1])), grants[-1].reason) == (1, NoGrant.NOT_HELD)


def test_the_end_of_the_prefill_leg_ends_following(holding):
    hashes = chain(4)
    prefill = Prefill(holding, hashes)
    holding.holder.lease(lease_request(hashes, follow_s=30.0, leg_id="leg"))
    prefill.compute(2)

    holding.holder.leg_ended("leg")
    (last,) = holding.holder.advance()

    assert (blocks_of(last), last.final, last.reason) == (prefill.ids[:2], True, NoGrant.NOT_HELD)
    assert not holding.holder.has_followed


def test_following_a_prompt_with_other_hashes_ends_with_its_leg(holding):
    prefill = Prefill(holding, chain(4, "another prompt"))
    holding.holder.lease(lease_request(chain(4), follow_s=30.0, leg_id="leg"))
    prefill.compute(4)
    holding.holder.leg_ended("another leg")
    assert holding.holder.advance() == []

    holding.holder.leg_ended("leg")
    (last,) = holding.holder.advance()

    assert (last.groups, last.final, last.reason) == ([], True, NoGrant.FOLLOW_OVER)
    assert (holding.holder.counts.leases, holding.holder.counts.refused_total) == (0, 1)


def test_a_lease_request_after_the_prefill_leg_is_not_followed(holding):
    hashes = chain(4)
    held = holding.hold(hashes[:1])  # The rest was evicted already.
    holding.holder.leg_ended("leg")

    grant = holding.holder.lease(lease_request(hashes, follow_s=30.0, leg_id="leg"))

    assert (blocks_of(grant), grant.final, grant.reason) == (held, True, NoGrant.NOT_HELD)
    assert not holding.holder.has_followed


def test_ended_legs_are_remembered_up_to_a_maximum(holding):
    for number in range(ENDED_LEGS_NOTED_MAX + 1):
        holding.holder.leg_ended(f"leg-{number}")

    first, last = (
        holding.holder.lease(lease_request(chain(2), f"ask-{leg}", follow_s=30.0, leg_id=leg))
        for leg in ("leg-0", f"leg-{ENDED_LEGS_NOTED_MAX}")
    )
    assert (first.final, last.final) == (False, True)
