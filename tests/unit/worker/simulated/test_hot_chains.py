"""Hot chains of a simulated engine."""

from __future__ import annotations

from connector.messages import Chain, EngineCall, StartFetch
from shared.contracts.kv_exchange import FetchKv, KvSource, unpack_full_hashes
from tests.unit.worker.simulated.builders import BLOCK, answer, completion, engine, fleet, params, prompt
from tests.unit.worker.simulated.fleet import Fleet, Member

QUESTION = 5
PROMPT, ANSWER = 10, 7
WRITTEN = (PROMPT + ANSWER - 1) // BLOCK
"""Full blocks of prompt and answer: the last token was never computed."""


def hot(member: Member) -> list[Chain]:
    return member.core.call(EngineCall(chains_max=8), member.now()).chains


def fetched(made: Fleet, chain: Chain, *, by: Member, of: Member):
    """That chain is where it was not."""
    source = KvSource(worker_id=of.key[0], epoch=of.key[1])
    fetch = FetchKv(worker_id=by.key[0], sender_id=of.key[0], hashes=chain.hashes, sources=[source], deadline_s=5.0)
    made.call(by, EngineCall(fetches=[StartFetch(fetch_id="f", fetch=fetch)]))
    made.until(lambda: "f" in by.fetched)
    return by.fetched["f"]


def test_the_next_turn_hits_the_copied_prompt_and_answer():
    made = fleet("leaves", "stays")
    leaves, stays = made.members.values()
    first = made.answer(leaves, prompt(PROMPT), params(ANSWER))

    (chain,) = hot(leaves)
    copied = fetched(made, chain, by=stays, of=leaves)
    made.kill(leaves)

    assert (copied.held, copied.fetched, copied.failure) == (0, WRITTEN, "")
    turn = [*first.tokens, *prompt(QUESTION, 1)]
    second = made.answer(stays, turn, params())
    assert second.stats.cached_tokens == WRITTEN * BLOCK
    assert completion(second) == completion(answer(engine(), turn, params()))


def test_a_conversation_of_many_turns_is_one_chain():
    made = fleet("one")
    (member,) = made.members.values()
    tokens = prompt(PROMPT)
    for turn in range(3):
        tokens = [*made.answer(member, tokens, params(ANSWER)).tokens, *prompt(QUESTION, turn + 1)]

    (chain,) = hot(member)
    assert chain.uses == 3
    assert len(unpack_full_hashes(chain.hashes)) == (len(tokens) - QUESTION - 1) // BLOCK


def test_uncomputed_tokens_are_in_no_chain():
    made = fleet("one", max_num_batched_tokens=BLOCK)
    (member,) = made.members.values()
    sequence = made.ask(member, prompt(8 * BLOCK), params())
    made.until(lambda: sequence.computed == 3 * BLOCK)
    made.abort(member, sequence)

    told = [unpack_full_hashes(chain.hashes) for chain in hot(member)]
    assert all(set(chain) <= set(member.core.cache.hashes()) for chain in told)
    assert max(map(len, told), default=0) <= 3


def test_evicted_chains_are_not_reported():
    made = fleet("one", kv_blocks=16)
    (member,) = made.members.values()
    made.answer(member, prompt(PROMPT), params(ANSWER))
    made.answer(member, prompt(60, 1), params(2))

    (chain,) = hot(member)
    assert len(unpack_full_hashes(chain.hashes)) == 61 // BLOCK
