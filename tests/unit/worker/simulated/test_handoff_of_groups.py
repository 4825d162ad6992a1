"""Simulated engines of models with windows or recurrent state hand prompts over at boundaries, as real ones do."""

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from connector.messages import EngineCall, StartFetch
from services.worker.engines.simulated.core.groups import SHAPES
from shared.contracts.kv_exchange import FetchKv, KvSource, LegOrder, pack_full_hashes
from tests.support.examples import examples
from tests.unit.worker.simulated.builders import (
    BLOCK,
    INSTANT,
    OFFER,
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
from tests.unit.worker.simulated.test_handoff import adds_up, at_rest

KINDS = pytest.mark.parametrize("groups", ["window", "state"])
MEMORY = 256


def pair(groups, **changes):
    made = fleet("p", "d", groups=groups, **{"kv_blocks": MEMORY, **changes})
    return made, *made.members.values()


def alone(tokens, max_tokens=6):
    """What an engine of a model with full attention generates."""
    return completion(answer(engine(kv_blocks=MEMORY), tokens, params(max_tokens)))


def last_boundary(tokens):
    return (len(tokens) - 1) // BLOCK * BLOCK


def bytes_of(groups, have, boundary):
    """Of a fetch: full attention from ``have`` on, and what the others need at the boundary."""
    others = SHAPES[groups]
    blocks = (boundary - have) // BLOCK + others.groups * min(others.window_blocks, boundary // BLOCK)
    return blocks * BLOCK * 4096


def lose_the_others(core):
    """Evict what the other groups keep."""
    cache = core.cache
    for name in list(cache._kept):
        for block in cache._kept.pop(name):
            del cache._keeps[block]


@given(
    groups=st.sampled_from(["window", "state"]),
    requests=REQUESTS,
    prefill_blocks=st.integers(80, 120),
    decode_blocks=st.integers(60, 80),
    timing=st.sampled_from([INSTANT, {}]),
)
@hypothesis_settings(max_examples=examples(60), deadline=None)
def test_disaggregated_tokens_equal_aggregated_ones(groups, requests, prefill_blocks, decode_blocks, timing):
    made = fleet()
    p = made.add(settings(worker_id="p", groups=groups, kv_blocks=prefill_blocks, kv_lease_share_max=1.0, **timing))
    d = made.add(settings(worker_id="d", groups=groups, kv_blocks=decode_blocks, **timing))
    made.on_step = lambda member: keeps_its_limits(member.core)
    fitting = [(prompt(n, seed), t) for n, seed, t in requests if n + t <= 20 * BLOCK]
    legs = []
    for tokens, count in fitting:
        offered = made.answer(p, tokens, OFFER).stats.transfer_report
        legs.append(made.ask(d, tokens, take(offered.offer if offered else None, count)))
    made.until(lambda: all(leg.finish_reason for leg in legs))

    for leg, (tokens, count) in zip(legs, fitting, strict=True):
        assert completion(leg) == alone(tokens, count)
        adds_up(leg.stats.transfer_report)
    at_rest(made)


@KINDS
@pytest.mark.parametrize("length", [3, BLOCK, BLOCK + 1, 40, 41, 42, 43])
def test_an_offer_is_taken_at_the_last_boundary(groups, length):
    made, p, d = pair(groups)
    tokens = prompt(length)
    offer = prefill(made, p, tokens)
    boundary = last_boundary(tokens)
    assert (offer.boundary if offer else 0) == boundary

    leg = made.answer(d, tokens, take(offer))

    assert completion(leg) == alone(tokens)
    assert leg.stats.received_tokens == boundary
    assert leg.stats.received_bytes == (bytes_of(groups, 0, boundary) if boundary else 0)
    if boundary:
        report = leg.stats.transfer_report
        assert sum(read.bytes for read in report.reads) == leg.stats.received_bytes
        assert (report.fetched_tokens, report.recomputed_tokens) == (boundary, length - boundary)
        assert report.first_token_received
    next_turn = made.answer(d, [*tokens, 7], params(1))
    assert next_turn.stats.cached_tokens == (boundary if groups == "state" else length // BLOCK * BLOCK)
    at_rest(made)


@KINDS
def test_full_attention_goes_ahead_while_a_prompt_is_computed(groups):
    timing = {"prefill_tokens_per_s": 1000.0, "transfer_bytes_per_s": 1e7, "max_num_batched_tokens": 40}
    made, p, d = pair(groups, **{"kv_blocks": 2 * MEMORY, **timing})
    tokens = prompt(403)
    followed = made.ask(d, tokens, fetch(p, follow=True, leg_id="leg"))
    leg = made.ask(p, tokens, params(1, order=LegOrder(leg_id="leg")))
    made.until(lambda: followed.finish_reason)

    assert completion(followed) == alone(tokens)
    report = followed.stats.transfer_report
    assert (report.prompt_tokens, report.fetched_tokens, report.recomputed_tokens) == (403, 400, 3)
    assert followed.stats.received_bytes == bytes_of(groups, 0, 400)
    assert followed.stats.first_token_at - leg.stats.first_token_at < 0.002
    ahead_s = followed.stats.scheduled_at - leg.stats.first_token_at
    assert ahead_s < bytes_of(groups, 0, 400) / 1e7 / 2
    at_rest(made)


@KINDS
@pytest.mark.parametrize("group", ["first", "last"])
def test_wrong_content_of_another_group_in_the_holders_memory_changes_the_tokens(groups, group):
    made, p, d = pair(groups)
    tokens = prompt(50)
    offer = prefill(made, p, tokens)
    name = engine().add(None, list(tokens), params(), 0.0).hashes[last_boundary(tokens) // BLOCK - 1]
    kept = p.core.cache.kept(name)
    p.core.cache.contents[kept[0 if group == "first" else -1]] ^= 1

    wrong = made.answer(d, tokens, take(offer, 12))

    assert wrong.stats.received_tokens == last_boundary(tokens)
    assert completion(wrong)[1:] != alone(tokens, 12)[1:]


@KINDS
def test_full_attention_that_is_cached_beyond_the_other_groups_is_not_read_again(groups):
    made, p, d = pair(groups)
    tokens = prompt(81)
    for member in (p, d):
        made.answer(member, tokens, params(1))
    lose_the_others(d.core)

    leg = made.answer(d, tokens, fetch(p))

    assert completion(leg) == alone(tokens)
    report = leg.stats.transfer_report
    assert (report.local_tokens, report.fetched_tokens, report.recomputed_tokens) == (76, 4, 1)
    assert leg.stats.received_bytes == bytes_of(groups, 76, 80)
    at_rest(made)


@KINDS
def test_a_turn_is_read_back_at_the_boundary_that_its_worker_kept(groups):
    made, p, d = pair(groups)
    first = made.answer(d, prompt(30), params(11))
    conversation = [*first.tokens, *prompt(10, seed=4)]

    leg = made.answer(p, conversation, fetch(d))

    # A state was kept at the end of the prompt's last block, and at eight blocks.
    assert leg.stats.transfer_report.fetched_tokens == {"window": 40, "state": 32}[groups]
    assert completion(leg) == alone(conversation)
    at_rest(made)


@KINDS
@pytest.mark.parametrize("killed_after_s", [0.0, 0.01, 0.03, 0.06])
@pytest.mark.parametrize("second", [True, False], ids=["another source", "no other source"])
def test_a_holder_that_ends_during_a_read_costs_a_second_read_or_the_prompt(groups, killed_after_s, second):
    made = fleet("p", "q", "d", groups=groups, kv_blocks=MEMORY, transfer_bytes_per_s=1e7, max_num_batched_tokens=64)
    p, q, d = made.members.values()
    tokens = prompt(161)
    for member in (p, q):
        made.answer(member, tokens, params(1))
    leg = made.ask(d, tokens, fetch(p, q) if second else fetch(p))
    made.run(until=made.now + killed_after_s)
    made.kill(p)
    made.until(lambda: leg.finish_reason)

    assert completion(leg) == alone(tokens)
    adds_up(leg.stats.transfer_report)
    if second:
        assert leg.stats.transfer_report.recomputed_tokens == 1
    made.run(until=made.now + 60.0)
    for member in (q, d):
        assert member.core.cache.free == member.core.cache.blocks


@KINDS
@pytest.mark.parametrize("steps", range(8))
def test_an_abort_at_any_moment_of_a_handoff_leaves_nothing_pinned(groups, steps):
    made, p, d = pair(groups, **{**INSTANT, "transfer_base_s": 0.02})
    leg = made.ask(d, prompt(41), take(prefill(made, p, prompt(41)), 50))
    made.run(until=made.now + 0.004 * steps)
    made.abort(d, leg)
    made.run(until=made.now + 0.1)

    assert p.core.exchange.holder.counts.pinned_blocks == 0
    assert d.core.cache.free == d.core.cache.blocks


@KINDS
def test_a_boundary_is_fetched_without_a_request(groups):
    made, p, d = pair(groups)
    tokens = prompt(60)
    hashes = made.answer(p, tokens, params(1)).hashes[: last_boundary(tokens) // BLOCK]
    source = KvSource(worker_id=p.key[0], epoch=p.key[1])
    wanted = FetchKv(
        worker_id=d.key[0], sender_id="o", hashes=pack_full_hashes(hashes), sources=[source], deadline_s=5.0
    )
    made.call(d, EngineCall(fetches=[StartFetch(fetch_id="f", fetch=wanted)]))
    made.until(lambda: d.fetched)

    assert (d.fetched["f"].fetched, d.fetched["f"].failure) == (len(hashes), "")
    warm = made.answer(d, tokens, params())
    assert warm.stats.cached_tokens == last_boundary(tokens)
    assert completion(warm) == alone(tokens)
    at_rest(made)
