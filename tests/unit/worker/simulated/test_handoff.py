"""Simulated engines exchange KV as real ones do: the tokens are those of one engine, and transfer reports are true."""

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from msgspec.structs import replace

from shared.contracts.kv_exchange import LegOrder
from tests.support.examples import examples
from tests.unit.worker.simulated.builders import (
    BLOCK,
    INSTANT,
    OFFER,
    VOCABULARY,
    answer,
    completion,
    engine,
    fetch,
    fleet,
    params,
    prefill,
    prompt,
    settings,
    take,
)
from tests.unit.worker.simulated.test_engine_core import REQUESTS, keeps_its_limits


def alone(tokens, max_tokens=6):
    return completion(answer(engine(kv_blocks=256), tokens, params(max_tokens)))


def adds_up(transfer_report):
    assert (
        transfer_report.local_tokens + transfer_report.fetched_tokens + transfer_report.recomputed_tokens
        == transfer_report.prompt_tokens
    )


def at_rest(made):
    """Nothing is pinned, held or under way anywhere."""
    made.run()
    for member in made.members.values():
        assert member.core.cache.free == member.core.cache.blocks
        assert member.core.exchange.holder.counts.pinned_blocks == 0
        assert not list(member.core.batch.unfinished())


@given(
    requests=REQUESTS,
    prefill_blocks=st.integers(40, 80),
    decode_blocks=st.integers(20, 40),
    timing=st.sampled_from([INSTANT, {}]),
)
@hypothesis_settings(max_examples=examples(60), deadline=None)
def test_disaggregated_tokens_equal_aggregated_ones(requests, prefill_blocks, decode_blocks, timing):
    made = fleet()
    p = made.add(settings(worker_id="p", kv_blocks=prefill_blocks, kv_lease_share_max=1.0, **timing))
    d = made.add(settings(worker_id="d", kv_blocks=decode_blocks, **timing))
    made.on_step = lambda member: keeps_its_limits(member.core)
    fitting = [(prompt(n, seed), t) for n, seed, t in requests if n + t <= 20 * BLOCK]
    legs = []
    for tokens, count in fitting:
        offered = made.answer(p, tokens, OFFER).stats.transfer_report
        legs.append(made.ask(d, tokens, take(offered.offer, count)))
    made.until(lambda: all(leg.finish_reason for leg in legs))

    for leg, (tokens, count) in zip(legs, fitting, strict=True):
        assert completion(leg) == alone(tokens, count)
        adds_up(leg.stats.transfer_report)
        assert leg.stats.cached_tokens + leg.stats.received_tokens >= (len(tokens) - 1) // BLOCK * BLOCK
    totals = d.core.measures
    assert totals.prompt_tokens == totals.computed_tokens + totals.cached_tokens + totals.received_tokens
    at_rest(made)


@given(length=st.integers(BLOCK + 1, 120), position=st.integers(0, 10_000), flip=st.integers(1, 2**62))
@hypothesis_settings(deadline=None)
def test_a_wrong_block_in_the_holders_memory_changes_the_tokens(length, position, flip):
    tokens, made = prompt(length), fleet("p", "d")
    p, d = made.members.values()
    wanted = prefill(made, p, tokens)
    blocks = p.core.cache.find(engine().add(None, list(tokens), params(), 0.0).hashes, (length - 1) // BLOCK)
    p.core.cache.contents[blocks[position % len(blocks)]] ^= flip

    wrong = made.answer(d, tokens, take(wanted, 12))

    assert wrong.stats.received_tokens >= (length - 1) // BLOCK * BLOCK
    assert completion(wrong) != alone(tokens, 12)


def test_only_what_the_decode_engine_has_not_cached_is_received():
    made = fleet("p", "d")
    p, d = made.members.values()
    made.answer(d, prompt(8 * BLOCK + 1), params())
    longer = prompt(8 * BLOCK + 1) + prompt(6 * BLOCK, seed=5)

    leg = made.answer(d, longer, take(prefill(made, p, longer)))

    assert leg.stats.cached_tokens == 8 * BLOCK
    assert leg.stats.received_tokens == 6 * BLOCK
    assert leg.stats.received_bytes == 6 * BLOCK * d.core.settings.kv_bytes_per_token
    assert (leg.stats.transfer_report.local_tokens, leg.stats.transfer_report.fetched_tokens) == (8 * BLOCK, 6 * BLOCK)
    assert leg.stats.transfer_report.recomputed_tokens == 1


def test_an_offer_of_another_prompt_is_not_read():
    tokens = prompt(40)
    edited = [*tokens[:13], 7, *tokens[14:]]
    made = fleet("p", "d")
    p, d = made.members.values()

    leg = made.answer(d, edited, take(prefill(made, p, tokens)))

    assert leg.stats.received_tokens == 0
    assert completion(leg) == alone(edited)
    at_rest(made)


def test_what_was_received_is_cached_for_the_next_request():
    made = fleet("p", "d")
    p, d = made.members.values()
    made.answer(d, prompt(41), take(prefill(made, p, prompt(41))))

    again = made.answer(d, prompt(41), params())

    assert again.stats.cached_tokens == 40


def test_transfers_share_the_link_one_after_the_other():
    timing = {**INSTANT, "kv_bytes_per_token": 100, "transfer_bytes_per_s": 1000.0, "transfer_base_s": 0.5}
    made = fleet("p", "d", **timing)
    p, d = made.members.values()
    offers = [prefill(made, p, prompt(4 * BLOCK + 1, seed)) for seed in (1, 2)]
    begun = made.now
    first, second = (
        made.ask(d, prompt(4 * BLOCK + 1, seed), take(offer)) for seed, offer in zip((1, 2), offers, strict=True)
    )
    made.run()

    assert second.stats.transfer_report.reads[0].read_s == pytest.approx(1.6 + 0.5)
    # As in vLLM, who waits for KV is still queued: what it counts as computing begins when all has come.
    assert first.stats.scheduled_at - begun == pytest.approx(1.6 + 0.5)
    assert second.stats.scheduled_at - begun == pytest.approx(2 * 1.6 + 0.5)
    assert first.stats.received_s == pytest.approx(1.6 + 0.5)


def test_a_lease_that_would_end_during_the_read_is_not_read():
    timing = {**INSTANT, "kv_bytes_per_token": 100, "transfer_bytes_per_s": 1000.0}
    made = fleet("p", "d", kv_lease_s=1.0, **timing)
    p, d = made.members.values()

    leg = made.answer(d, prompt(4 * BLOCK + 1), take(prefill(made, p, prompt(4 * BLOCK + 1))))

    assert leg.stats.received_tokens == 0
    assert completion(leg) == alone(prompt(4 * BLOCK + 1))
    assert "lease" in leg.stats.transfer_report.reads[0].failure
    at_rest(made)


def test_an_expired_lease_is_not_read():
    made = fleet("p", "d", kv_lease_s=1.0)
    p, d = made.members.values()
    offer = prefill(made, p, prompt(41))
    made.run(until=made.now + 5.0)

    leg = made.answer(d, prompt(41), take(offer))

    assert p.core.exchange.holder.counts.expired_total == 1
    assert (leg.stats.received_tokens, completion(leg)) == (0, alone(prompt(41)))


def test_blocks_are_unpinned_as_soon_as_they_are_read():
    made = fleet("p", "d")
    p, d = made.members.values()
    offer = prefill(made, p, prompt(41))
    assert p.core.exchange.holder.counts.pinned_blocks == 10

    made.answer(d, prompt(41), take(offer))
    made.run(until=made.now + 0.1)

    assert p.core.exchange.holder.counts.pinned_blocks == 0
    assert p.core.exchange.holder.counts.released_total == 1


def pinned_soon(made, member):
    made.run(until=made.now + 0.1)
    return member.core.exchange.holder.counts.pinned_blocks


def test_an_unneeded_offer_is_released_at_once():
    made = fleet("p", "d", max_num_seqs=1)
    p, d = made.members.values()
    long, tokens = prompt(20, seed=3), prompt(41)
    made.answer(d, tokens, params())
    cached = made.ask(d, tokens, take(prefill(made, p, tokens), 100))
    assert pinned_soon(made, p) == 0

    edited = made.ask(d, prompt(41, seed=4), take(prefill(made, p, long)))
    queued = made.ask(d, prompt(41, seed=5), take(prefill(made, p, prompt(41, seed=5))))
    made.abort(d, edited)
    made.abort(d, queued)

    assert not cached.finish_reason
    assert pinned_soon(made, p) == 0


def test_a_streamed_handoff_waits_only_for_the_prompts_end():
    timing = {
        "prefill_tokens_per_s": 1000.0,
        "kv_bytes_per_token": 1000,
        "transfer_bytes_per_s": 2e6,
        "max_num_batched_tokens": 40,
        "kv_blocks": 256,
    }
    tokens = prompt(401)
    apart = fleet("p", "d", **timing)
    p, d = apart.members.values()
    after = apart.answer(d, tokens, take(prefill(apart, p, tokens)))

    together = fleet("p", "d", **timing)
    p, d = together.members.values()
    followed = together.ask(d, tokens, fetch(p, follow=True))
    together.ask(p, tokens, params(1))
    together.until(lambda: followed.finish_reason)

    assert completion(followed) == completion(after) == alone(tokens)
    transfer_report = followed.stats.transfer_report
    assert (transfer_report.fetched_tokens, transfer_report.recomputed_tokens) == (400, 1)
    assert transfer_report.reads[0].followed
    exposed = followed.stats.scheduled_at - 0.401
    assert exposed < (after.stats.scheduled_at - 0.401) / 3
    at_rest(together)


def test_a_decode_leg_begins_when_the_prefill_leg_has_sampled():
    timing = {"prefill_tokens_per_s": 1000.0, "kv_bytes_per_token": 1000, "transfer_bytes_per_s": 1e6}
    made, tokens = fleet("p", "d", kv_blocks=256, **timing), prompt(403)
    p, d = made.members.values()
    followed = made.ask(d, tokens, fetch(p, follow=True, leg_id="leg"))
    leg = made.ask(p, tokens, params(1, order=LegOrder(leg_id="leg")))
    made.until(lambda: followed.finish_reason)

    assert completion(followed) == alone(tokens)
    assert followed.stats.transfer_report.first_token_received
    assert followed.stats.first_token_at - leg.stats.first_token_at < 0.002
    assert followed.stats.scheduled_at > followed.stats.first_token_at
    report = followed.stats.transfer_report
    assert (report.prompt_tokens, report.fetched_tokens, report.recomputed_tokens) == (403, 400, 3)
    at_rest(made)


def test_a_token_of_another_prompt_or_vocabulary_is_not_used():
    made, tokens = fleet("p", "d", "e"), prompt(42)
    p, *readers = made.members.values()
    other = prefill(made, p, [*tokens[:-1], 3]).first_token
    offer = prefill(made, p, tokens)
    for reader, token in zip(readers, (other, replace(offer.first_token, token_id=VOCABULARY)), strict=True):
        leg = made.answer(reader, tokens, take(replace(offer, first_token=token)))

        assert completion(leg) == alone(tokens)
        assert not leg.stats.transfer_report.first_token_received


@pytest.mark.parametrize("spare", [0, 1])
def test_without_memory_for_the_first_token_it_is_sampled_again(spare):
    made, tokens = fleet("p"), prompt(8 * BLOCK)
    p = made.members["p"]
    d = made.add(settings(worker_id="d", epoch=1, kv_blocks=16 + spare, decode_base_s=1.0))
    offer = prefill(made, p, tokens)
    other = made.ask(d, prompt(8 * BLOCK - 3, seed=5), params(3))
    made.until(lambda: other.stats.first_token_at is not None)
    leg = made.ask(d, tokens, take(offer, 2))
    made.until(lambda: leg.finish_reason)

    assert leg.stats.transfer_report.first_token_received is bool(spare)
    assert completion(leg) == alone(tokens, 2)
    at_rest(made)


def test_prompts_that_are_followed_never_wait_for_each_others_leases():
    timing = {"max_num_batched_tokens": 40, "kv_blocks": 128, "kv_lease_share_max": 0.5}
    made = fleet("p", "d", **timing)
    p, d = made.members.values()
    legs = []
    for seed in (1, 2):
        legs.append(made.ask(d, prompt(201, seed), fetch(p, follow=True)))
        made.ask(p, prompt(201, seed), params(1))
    made.until(lambda: all(leg.finish_reason for leg in legs))

    assert made.now < 1.5
    assert [completion(leg) for leg in legs] == [alone(prompt(201, seed)) for seed in (1, 2)]
    assert sum(leg.stats.transfer_report.fetched_tokens for leg in legs) >= 64 * BLOCK
    at_rest(made)


def test_a_follower_learns_the_prefill_workers_cached_tokens():
    made = fleet("p", "d", max_num_batched_tokens=8)
    p, d = made.members.values()
    made.answer(p, prompt(21), params(1))

    followed = made.ask(d, prompt(61), fetch(p, follow=True))
    made.ask(p, prompt(61), params(1))
    made.until(lambda: followed.finish_reason)

    assert followed.stats.transfer_report.prefill_cached_tokens == 20
    assert followed.stats.transfer_report.fetched_tokens == 60


@pytest.mark.parametrize("prefill_first", [True, False])
def test_a_leg_that_follows_other_tokens_waits_only_for_the_prefill_leg(prefill_first):
    """As when both workers tokenize a body differently: none of the expected blocks will ever come."""
    made = fleet("p", "d")
    p, d = made.members.values()
    others, named = prompt(41, 1), params(1, order=LegOrder(leg_id="leg"))
    if prefill_first:
        made.answer(p, others, named)
    followed = made.ask(d, prompt(41, 2), fetch(p, follow=True, leg_id="leg"))
    if not prefill_first:
        made.ask(p, others, named)
    made.until(lambda: followed.finish_reason)

    assert made.now < 2.0
    assert completion(followed) == alone(prompt(41, 2))
    assert followed.stats.transfer_report.recomputed_tokens == 41
    at_rest(made)


def test_previous_turns_are_read_back_from_the_decode_engine():
    made = fleet("p", "d")
    p, d = made.members.values()
    first = made.answer(d, prompt(30), params(11))
    conversation = [*first.tokens, *prompt(10, seed=4)]

    leg = made.answer(p, conversation, fetch(d))

    assert leg.stats.transfer_report.fetched_tokens == 40
    assert completion(leg) == alone(conversation)
    at_rest(made)


def test_too_few_tokens_are_not_worth_fetching():
    made = fleet("p", "d")
    p, d = made.members.values()
    made.answer(d, prompt(30), params())

    leg = made.answer(p, prompt(30), fetch(d, fetch_min_tokens=29))

    assert (leg.stats.transfer_report.fetched_tokens, leg.stats.transfer_report.reads) == (0, [])


def test_several_sources_each_give_their_part():
    made = fleet("a", "b", "c")
    a, b, c = made.members.values()
    made.answer(a, prompt(17), params(1))
    made.answer(b, prompt(41), params(1))

    leg = made.answer(c, prompt(61), fetch(a, b))

    assert [read.tokens for read in leg.stats.transfer_report.reads] == [16, 24]
    assert completion(leg) == alone(prompt(61))
    adds_up(leg.stats.transfer_report)


def test_below_the_cache_threshold_nothing_is_computed():
    made = fleet("p", "d")
    _, d = made.members.values()
    made.answer(d, prompt(20), params())
    before = d.core.measures.computed_tokens

    warm = made.answer(d, prompt(20), params(order=LegOrder(cache_hit_threshold=0.8)))
    cold = made.answer(d, prompt(40, seed=3), params(order=LegOrder(cache_hit_threshold=0.33)))

    assert (warm.finish_reason, len(completion(warm))) == ("length", 6)
    assert (cold.finish_reason, completion(cold), cold.stats.transfer_report.refused) == ("cache_threshold", [], True)
    assert d.core.measures.computed_tokens - before == 4
    assert d.core.cache.free == d.core.cache.blocks


def test_what_can_be_fetched_counts_for_the_threshold():
    made = fleet("p", "d")
    p, d = made.members.values()
    made.answer(p, prompt(41), params())

    leg = made.answer(d, prompt(41), fetch(p, cache_hit_threshold=0.9))

    assert leg.finish_reason == "length"
    assert leg.stats.transfer_report.fetched_tokens == 40


def test_a_preempted_sequence_fetches_again_instead_of_computing_again():
    made = fleet()
    p = made.add(settings(worker_id="p", kv_blocks=64))
    d = made.add(settings(worker_id="d", kv_blocks=16, max_model_len=60))
    for seed in (1, 2):
        made.answer(p, prompt(20, seed), params(1))
    old, young = (made.ask(d, prompt(20, seed), fetch(p, max_tokens=30)) for seed in (1, 2))
    made.run()

    assert d.core.batch.preemptions > 0
    assert [completion(one) for one in (old, young)] == [alone(prompt(20, seed), 30) for seed in (1, 2)]
    transfer_report = young.stats.transfer_report
    assert transfer_report.preemptions > 0
    assert transfer_report.fetched_tokens == 19
    adds_up(transfer_report)
    at_rest(made)


@pytest.mark.parametrize("steps", range(8))
def test_an_abort_at_any_moment_of_a_handoff_leaves_nothing_pinned(steps):
    timing = {**INSTANT, "transfer_base_s": 0.02}
    made = fleet("p", "d", **timing)
    p, d = made.members.values()
    leg = made.ask(d, prompt(41), take(prefill(made, p, prompt(41)), 50))
    made.run(until=made.now + 0.004 * steps)
    made.abort(d, leg)
    made.run(until=made.now + 0.1)

    assert p.core.exchange.holder.counts.pinned_blocks == 0
    assert d.core.cache.free == d.core.cache.blocks
