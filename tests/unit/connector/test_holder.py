"""A holder over vLLM's block pool: granted blocks stay pinned, and every block is freed in the end."""

from __future__ import annotations

import pytest

from shared.contracts.kv_exchange import LEASE_BLOCKS_MAX, NoGrant
from tests.support.kv_messages import blocks_of, first_of
from tests.unit.connector.holding import Holding, chain, lease_request, release


@pytest.fixture
def holding():
    return Holding()


def test_the_longest_cached_prefix_is_pinned_until_its_expiry(holding):
    hashes = chain(6)
    held = holding.hold(hashes[:4])

    grant = holding.holder.lease(lease_request(hashes))

    assert blocks_of(grant) == held
    assert (first_of(grant), grant.last_hash, grant.reason, grant.final) == (0, hashes[3], NoGrant.NOT_HELD, True)
    assert (grant.clock_s, grant.until_s) == (100.0, 105.0)
    assert holding.free == holding.free_at_first - 4


def test_a_complete_grant_has_no_reason(holding):
    holding.hold(chain(3))

    grant = holding.holder.lease(lease_request(chain(3)))

    assert (len(blocks_of(grant)), grant.reason) == (3, None)


def test_a_gap_ends_the_prefix(holding):
    hashes = chain(3)
    holding.hold([hashes[0], hashes[2]])

    assert len(blocks_of(holding.holder.lease(lease_request(hashes)))) == 1


def test_another_prompt_of_the_same_length_matches_nothing(holding):
    holding.hold(chain(3, "a conversation"))

    grant = holding.holder.lease(lease_request(chain(3, "a conversation, edited")))

    assert (grant.lease_id, grant.groups, grant.reason) == ("", [], NoGrant.NOT_HELD)


def test_leased_blocks_cannot_be_evicted(holding):
    hashes = chain(4)
    grant = holding.holder.lease(lease_request(hashes[: len(holding.hold(hashes))]))

    taken = holding.allocate_all_free()

    assert not {block.block_id for block in taken} & set(blocks_of(grant))
    assert [holding.pool.get_cached_block(name, [0])[0].block_id for name in hashes] == blocks_of(grant)


def test_released_blocks_are_free_and_still_cached(holding):
    held = holding.hold(chain(4))
    holding.holder.lease(lease_request(chain(4)))

    holding.holder.release(release("ask-1"))

    assert holding.free == holding.free_at_first
    assert blocks_of(holding.holder.lease(lease_request(chain(4), "ask-2"))) == held


def test_the_end_of_a_prompt_is_evicted_before_its_beginning(holding):
    hashes = chain(4)
    holding.hold(hashes)
    holding.holder.lease(lease_request(hashes))
    holding.holder.release(release("ask-1"))

    holding.pool.get_new_blocks(holding.free - 2)

    assert len(blocks_of(holding.holder.lease(lease_request(hashes, "ask-2")))) == 2


def test_a_lease_ends_at_its_expiry_on_the_holders_clock(holding):
    holding.hold(chain(2))
    holding.holder.lease(lease_request(chain(2), hold_s=5.0))

    holding.now = 104.999
    holding.holder.advance()
    assert holding.holder.counts.pinned_blocks == 2

    holding.now = 105.0
    holding.holder.advance()
    assert (holding.holder.counts.pinned_blocks, holding.holder.counts.expired_total) == (0, 1)
    assert holding.free == holding.free_at_first


def test_a_lease_lasts_no_longer_than_the_holder_allows():
    holding = Holding(lease_s_max=2.0)
    holding.hold(chain(1))

    assert holding.holder.lease(lease_request(chain(1), hold_s=1e9)).until_s == 102.0


@pytest.mark.parametrize("hold_s", [0.0, -1.0, float("nan")])
def test_a_lease_without_duration_is_refused(holding, hold_s):
    holding.hold(chain(1))

    assert holding.holder.lease(lease_request(chain(1), hold_s=hold_s)).groups == []


def test_blocks_in_several_leases_stay_until_the_last_has_ended(holding):
    holding.hold(chain(3))
    holding.holder.lease(lease_request(chain(3), "ask-1", hold_s=5.0))
    holding.holder.lease(lease_request(chain(2), "ask-2", hold_s=9.0))
    assert (holding.holder.counts.leases, holding.holder.counts.pinned_blocks) == (2, 3)

    holding.now = 105.0
    holding.holder.advance()
    assert holding.holder.counts.pinned_blocks == 2

    holding.holder.release(release("ask-2"))
    assert holding.free == holding.free_at_first


def test_a_running_requests_blocks_can_be_leased_and_outlive_it(holding):
    running = holding.run(chain(3))
    holding.holder.lease(lease_request(chain(3)))
    holding.end(running)

    assert holding.free == holding.free_at_first - 3
    holding.holder.release(release("ask-1"))
    assert holding.free == holding.free_at_first


@pytest.mark.parametrize(
    "unwanted",
    [
        release("ask-1", reader_id="decode-2"),
        release("ask-1", epoch=6),
        release("ask-1", worker_id="prefill-2"),
        release("ask-2"),
        release(lease_id="prefill-1-7-1"),
    ],
)
def test_a_release_that_is_not_the_readers_own_is_ignored(holding, unwanted):
    holding.hold(chain(2))
    holding.holder.lease(lease_request(chain(2)))

    holding.holder.release(unwanted)

    assert holding.holder.counts.pinned_blocks == 2


def test_releasing_twice_frees_once(holding):
    holding.hold(chain(2))
    holding.holder.lease(lease_request(chain(2), "ask-1"))
    holding.holder.lease(lease_request(chain(2), "ask-2"))

    holding.holder.release(release("ask-1"))
    holding.holder.release(release("ask-1"))

    assert holding.holder.counts.pinned_blocks == 2


def test_a_release_before_its_request_leaves_no_permanent_lease(holding):
    holding.hold(chain(2))
    holding.holder.release(release("ask-1"))
    holding.holder.lease(lease_request(chain(2), "ask-1"))

    holding.now += 5.0
    holding.holder.advance()

    assert holding.free == holding.free_at_first


def test_a_request_for_another_epoch_or_worker_is_refused(holding):
    holding.hold(chain(2))

    assert holding.holder.lease(lease_request(chain(2), epoch=6)).reason is NoGrant.EPOCH
    assert holding.holder.lease(lease_request(chain(2), worker_id="prefill-2")).reason is NoGrant.EPOCH
    assert holding.free == holding.free_at_first


def test_leases_pin_at_most_their_share_of_the_memory():
    holding = Holding(blocks=20, lease_share_max=0.5)
    holding.hold(chain(15))

    first = holding.holder.lease(lease_request(chain(15), "ask-1"))
    again = holding.holder.lease(lease_request(chain(15), "ask-2"))
    holding.hold(chain(2, "another prompt"))
    other = holding.holder.lease(lease_request(chain(2, "another prompt"), "ask-3"))

    assert (len(blocks_of(first)), first.reason) == (10, NoGrant.FULL)
    assert (len(blocks_of(again)), again.reason) == (10, NoGrant.FULL)
    assert (blocks_of(other), other.reason) == ([], NoGrant.FULL)
    assert holding.holder.counts.refused_total == 1


@pytest.mark.parametrize("hashes", [b"", b"x" * 33, bytes(32 * (LEASE_BLOCKS_MAX + 1))])
def test_a_malformed_lease_request_is_refused(holding, hashes):
    holding.hold(chain(2))
    malformed = lease_request(chain(1))
    malformed = type(malformed)(
        **{name: getattr(malformed, name) for name in malformed.__struct_fields__} | {"hashes": hashes}
    )

    assert holding.holder.lease(malformed).reason is NoGrant.NOT_HELD
    assert holding.free == holding.free_at_first


def test_a_repeated_lease_request_is_granted_once(holding):
    holding.hold(chain(2))
    holding.holder.lease(lease_request(chain(2)))

    assert holding.holder.lease(lease_request(chain(2))).groups == []
    holding.holder.release(release("ask-1"))
    assert holding.free == holding.free_at_first


def test_an_offer_pins_a_prompt_before_its_request_frees_it(holding):
    hashes = chain(3)
    running = holding.run(hashes)
    offer = holding.offer(hashes, [block.block_id for block in running])
    holding.end(running)
    holding.allocate_all_free()

    assert blocks_of(offer) == [block.block_id for block in running]
    assert (offer.worker_id, offer.epoch, offer.last_hash, offer.until_s) == ("prefill-1", 7, hashes[2], 110.0)


def test_any_reader_that_names_an_offer_may_release_it(holding):
    running = holding.run(chain(3))
    offer = holding.offer(chain(3), [block.block_id for block in running])
    holding.end(running)

    holding.holder.release(release(lease_id=offer.lease_id, reader_id="decode-9"))

    assert holding.free == holding.free_at_first


def test_an_offer_that_its_worker_released_before_is_not_made(holding):
    running = holding.run(chain(3))
    ids = [block.block_id for block in running]

    holding.holder.release(release(lease_id="leg-1", reader_id="prefill-1"))
    holding.holder.release(release(lease_id="leg-2", reader_id="decode-1"))

    assert holding.offer(chain(3), ids, "leg-1") is None
    assert holding.holder.counts.pinned_blocks == 0
    assert holding.offer(chain(3), ids, "leg-2") is not None, "another worker cannot forbid an offer"


def test_two_offers_of_one_prompt_are_two_leases(holding):
    running = holding.run(chain(2))
    ids = [block.block_id for block in running]
    one, other = holding.offer(chain(2), ids), holding.offer(chain(2), ids)
    holding.end(running)

    holding.holder.release(release(lease_id=one.lease_id))

    assert holding.holder.counts.pinned_blocks == 2
    holding.holder.release(release(lease_id=other.lease_id))
    assert holding.free == holding.free_at_first


def test_an_offer_shrinks_with_the_free_lease_share():
    holding = Holding(blocks=20, lease_share_max=0.5)
    first, second = holding.run(chain(8, "one")), holding.run(chain(8, "two"))

    whole = holding.offer(chain(8, "one"), [block.block_id for block in first])
    part = holding.offer(chain(8, "two"), [block.block_id for block in second])
    none = holding.offer(chain(8, "two")[2:], [block.block_id for block in second][2:])

    assert (len(blocks_of(whole)), len(blocks_of(part)), none) == (8, 2, None)
    assert part.last_hash == chain(8, "two")[1]


def test_a_prompt_shorter_than_a_block_is_not_offered(holding):
    assert holding.offer([], []) is None
    assert holding.holder.counts.refused_total == 0


def test_release_all_frees_everything_and_refuses_new_leases(holding):
    hashes = chain(4)
    running = holding.run(hashes)
    holding.holder.lease(lease_request(hashes))
    holding.offer(hashes, [block.block_id for block in running])
    holding.end(running)

    holding.holder.release_all()

    assert holding.free == holding.free_at_first
    assert holding.holder.lease(lease_request(hashes, "ask-2")).reason is NoGrant.DRAINING
    assert holding.offer(hashes, [block.block_id for block in running]) is None


def test_the_prefix_cache_resets_only_without_leases(holding):
    holding.hold(chain(2))
    holding.holder.lease(lease_request(chain(2)))
    assert not holding.pool.reset_prefix_cache()

    holding.now = holding.holder.counts.next_expiry_s
    holding.holder.advance()

    assert holding.pool.reset_prefix_cache()


def test_blocks_hashed_but_not_yet_computed_are_not_granted(holding):
    hashes = chain(4)
    computed = holding.run(hashes[:2])
    ahead = holding.pool.get_new_blocks(2)
    running = holding.schedule(hashes, [*computed, *ahead], 2)
    blocks = [block.block_id for block in (*computed, *ahead)]
    assert blocks_of(holding.holder.lease(lease_request(hashes, "ask-1"))) == blocks[:2]

    holding.holder.computed(running)
    assert blocks_of(holding.holder.lease(lease_request(hashes, "ask-2"))) == blocks
