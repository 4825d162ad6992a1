"""What the holder lends of models with windows and states, under vLLM's own scheduler."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared.contracts.ids import LegId
from shared.contracts.kv_exchange import FirstToken, KvGrant, NoGrant, unpack_block_ids
from tests.unit.connector.holding import lease_request, release
from tests.unit.connector.lending import HOLDER, LAYOUTS
from tests.unit.connector.real_scheduler import Engine

PROMPT = [number % 90 for number in range(150)]
"""Blocks of 64 tokens end at 64 and 128, the last boundary with a unit of 16 is 144."""
LEG = LegId("leg")


def engine_of(folder: Path, layout: str, **options) -> Engine:
    pytest.importorskip("vllm")
    return Engine(folder, depth=1, layout=LAYOUTS[layout], blocks=64, **options)


def step(engine: Engine) -> list[KvGrant]:
    engine.schedule()
    engine.compute()
    return engine.holder.advance()


def ask(engine: Engine, hashes: list[bytes], **fields) -> KvGrant:
    return engine.holder.lease(lease_request(hashes, **{"ask_id": "ask", **HOLDER, **fields}))


def ended(engine: Engine, prompt: list[int] = PROMPT) -> list[bytes]:
    """A request has computed the prompt and ended; its hashes up to the last boundary."""
    hashes = engine.add("r", prompt, 1)
    while engine.busy:
        step(engine)
    return hashes[: (len(prompt) - 1) // engine.alignment * engine.alignment // engine.unit]


def blocks_in(grant: KvGrant) -> list[tuple[int, int]]:
    """First index and number of blocks by group."""
    return [(group.first, len(unpack_block_ids(group.block_ids))) for group in grant.groups]


def test_a_state_inside_a_block_is_lent_when_a_step_has_copied_it(tmp_path):
    engine = engine_of(tmp_path, "states inside blocks")
    hashes = engine.add("r", PROMPT, 9)
    boundaries = []
    for at in range(4):
        step(engine)
        boundaries.append(ask(engine, hashes, ask_id=f"ask-{at}").boundary)

    # The third step ends at 144, in the block into which the request then writes on; the fourth copies it.
    assert boundaries == [0, 128, 128, 144]
    assert engine.copies == 1


def test_a_boundary_that_an_equal_prompt_still_writes_is_lent_with_the_step_that_copies_it(tmp_path):
    """The wait ends with the write. Only if that never came, a shorter boundary would be lent after a while."""
    pytest.importorskip("vllm")
    engine = Engine(tmp_path, depth=2, layout=LAYOUTS["states inside blocks"], blocks=64)
    hashes = engine.add("first", PROMPT, 1)
    for name, tokens in (("second", 1), ("third", 30)):
        engine.add(name, PROMPT, tokens)
    ask(engine, hashes, follow_s=30.0, leg_id=LEG)
    while "first" in engine.scheduler.requests:
        both_in_flight(engine)
    engine.holder.leg_ended(LEG)
    before = engine.holder.advance()
    (last,) = both_in_flight(engine)

    assert (before, engine.now) == ([], 0.0)
    assert (last.boundary, last.final, last.reason) == (144, True, None)


def both_in_flight(engine: Engine) -> list[KvGrant]:
    engine.schedule()
    if len(engine.queue) == engine.depth:
        engine.compute()
    return engine.holder.advance()


def test_full_attention_goes_ahead_and_the_last_grant_has_the_state_and_the_token(tmp_path):
    engine = engine_of(tmp_path, "three states")
    hashes, token = engine.add("r", PROMPT, 1)[:4], FirstToken(token_id=7, basis=b"b" * 16)
    first = ask(engine, hashes, follow_s=30.0, leg_id=LEG)
    ahead = [grant for _time in range(3) for grant in step(engine)]
    engine.holder.note_first_token(LEG, token)
    engine.holder.leg_ended(LEG)
    (last,) = engine.holder.advance()

    assert (first.groups, first.final) == ([], False)
    assert [(blocks_in(grant)[3], grant.boundary, grant.final) for grant in ahead] == [
        ((0, 2), 0, False),
        ((2, 2), 0, False),
    ]
    assert [grant.last_hash for grant in ahead] == [hashes[1], hashes[3]]
    assert blocks_in(last) == [(3, 1), (3, 1), (3, 1), (4, 0)]
    assert (last.boundary, last.last_hash, last.final, last.reason) == (128, hashes[3], True, None)
    assert last.first_token == token


def test_a_prompt_that_is_cached_needs_no_leg(tmp_path):
    engine = engine_of(tmp_path, "window")
    hashes = ended(engine)
    ahead = ask(engine, hashes, follow_s=30.0)
    (last,) = engine.holder.advance()

    assert (blocks_in(ahead), ahead.boundary, ahead.final) == ([(0, 0), (0, 9)], 0, False)
    assert (blocks_in(last), last.boundary, last.final, last.reason) == ([(6, 3), (9, 0)], 144, True, None)


def test_windows_alone_are_lent_as_soon_as_they_are_computed_without_a_leg(tmp_path):
    engine = engine_of(tmp_path, "only a window")
    hashes = engine.add("r", PROMPT, 9)
    hashes = hashes[: (len(PROMPT) - 1) // engine.unit]
    first = ask(engine, hashes, follow_s=30.0)
    (last,) = [grant for _time in range(5) for grant in step(engine)]

    assert (first.groups, first.final) == ([], False)
    assert (last.boundary, last.last_hash, last.final, last.reason) == (
        len(hashes) * engine.unit,
        hashes[-1],
        True,
        None,
    )


def test_only_what_the_reader_lacks_is_pinned(tmp_path):
    engine = engine_of(tmp_path, "window")
    hashes = ended(engine)
    whole = ask(engine, hashes)
    rest = ask(engine, hashes, ask_id="other", have=100)
    late = ask(engine, hashes[2:], ask_id="late", first=2, have=96)

    assert blocks_in(whole) == [(6, 3), (0, 9)]
    assert blocks_in(rest) == blocks_in(late) == [(6, 3), (6, 3)]
    assert late.groups[0] == whole.groups[0]
    assert late.last_hash == whole.last_hash == hashes[-1]


@pytest.mark.parametrize(
    ("layout", "fields"),
    [
        ("window", {"first": 7, "have": 112}),  # the window begins at 105
        ("window of other blocks", {"first": 1}),  # inside a block of full attention
        ("window", {"first": -1}),
        ("window", {"have": -1}),
    ],
)
def test_what_the_hashes_do_not_tell_is_not_lent(tmp_path, layout, fields):
    engine = engine_of(tmp_path, layout)
    hashes = ended(engine)
    grant = ask(engine, hashes[max(0, fields.get("first", 0)) :], **fields)

    assert (grant.groups, grant.reason) == ([], NoGrant.NOT_HELD)


def test_what_is_less_than_the_prompt_is_not_all_that_was_asked_for(tmp_path):
    engine = engine_of(tmp_path, "three states", retention=None)
    hashes = ended(engine)
    no_step_ended_there = ask(engine, hashes[:3])
    other_prompt = ask(engine, [*hashes[:2], b"x" * 32], ask_id="other")

    for grant in (no_step_ended_there, other_prompt):
        assert (grant.boundary, grant.reason, blocks_in(grant)[3]) == (64, NoGrant.NOT_HELD, (0, 2))


def test_the_limits_shorten_a_boundary_or_refuse_it(tmp_path):
    engine = engine_of(tmp_path, "window", retention=None)
    hashes = ended(engine, [number % 90 for number in range(299)])
    first, pinned = ask(engine, hashes), ask(engine, hashes[:16], ask_id="pinned")
    other = ask(engine, ended(engine, [1] * 150), ask_id="other")
    engine.holder.release(release("ask", **HOLDER))
    engine.holder.release(release("pinned", **HOLDER))
    again = ask(engine, hashes, ask_id="again", have=160)

    # 19 of 64 blocks may be pinned: 16 of full attention and 3 of the window, of 18 and 3.
    assert (first.boundary, blocks_in(first), first.reason) == (256, [(13, 3), (0, 16)], NoGrant.NOT_HELD)
    assert (pinned.boundary, pinned.groups) == (256, first.groups)
    assert (other.groups, other.reason) == ([], NoGrant.FULL)
    assert (again.boundary, again.reason) == (288, None)


def test_states_and_windows_are_evicted_before_full_attention(tmp_path):
    engine = engine_of(tmp_path, "all kinds")
    hashes = ended(engine)
    ask(engine, hashes)
    engine.holder.release(release("ask", **HOLDER))
    spare = engine.pool.get_num_free_blocks()
    grant = ask(engine, hashes, ask_id="again")
    pinned = sum(count for _first, count in blocks_in(grant))
    engine.holder.release(release("again", **HOLDER))
    engine.pool.get_new_blocks(spare - pinned + 1)

    held = [engine.pool.get_cached_block(hashes[-1], [group]) is not None for group in range(3)]
    assert held == [False, True, True]


def test_a_chain_ends_at_its_last_boundary(tmp_path):
    engine = engine_of(tmp_path, "states inside blocks")
    hashes = ended(engine)
    longer = [*hashes, b"x" * 32]

    assert engine.holder.held(longer) == engine.holder.held(hashes) == 9
    assert engine.holder.held(longer[:8]) == 8
    assert engine.holder.held([b"x" * 32]) == 0
