"""Proofs that a decode worker continues from a boundary of a prompt as one engine continues from its own cache there.

A prompt's tail after the boundary is short: a model with a recurrent state answers the same after a longer one, whatever
state it began with. So each proof has its negative control, in which a block of the offer is another one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import lcm

import msgspec

from connector.groups import GroupPlan
from connector.layout.routes import block_bytes_of
from shared.contracts.channels import KV_HANDSHAKE
from shared.contracts.inference import LegKind
from shared.contracts.kv_exchange import (
    AskKvHandshake,
    GroupBlocks,
    KvGroupKind,
    KvHandshake,
    KvOffer,
    KvTransferReport,
    pack_block_ids,
    unpack_block_ids,
)
from shared.contracts.workers import HashScheme, WorkerRecord
from tests.engines.kv_pair import DECODE, PREFILL, Pair
from tests.support.kv_driver import ANSWER_S_MAX, Driver, transfer_report_of
from tests.support.prompts import random_prompt

ANSWER = 32
"""Greedy tokens compared."""
CONTROLLED = 16
"""Tokens of a control, one of which must differ."""
NULL_BLOCK = 0
"""VLLM's block that no request writes."""


def lengths(hashing: HashScheme, about: int) -> list[int]:
    """Prompts of about so many tokens with tails of 1, 2, one less than a unit and no tokens."""
    boundary = about // hashing.align * hashing.align
    return [boundary + tail for tail in (1, 2, hashing.align - 1, hashing.align)]


async def handshake_of(driver: Driver, worker: str) -> KvHandshake:
    asked = AskKvHandshake(worker_id=driver.source(worker).worker_id, reader_id=driver.reader_id)
    return await driver.bus.ask(KV_HANDSHAKE, asked, timeout_s=ANSWER_S_MAX)


def bytes_at(peer: KvHandshake, boundary: int) -> int:
    """Bytes of what all groups need at a boundary: full attention, windows and states."""
    plan = GroupPlan(peer.groups, peer.hash_block_size, peer.alignment)
    return sum(
        len(plan.needed(number, 0, boundary)) * sum(block_bytes_of(rank, number) for rank in peer.ranks)
        for number in range(len(peer.groups))
        if boundary
    )


async def from_own_cache(
    driver: Driver,
    worker: str,
    prompt: Sequence[int],
    hashing: HashScheme,
    tokens: int = ANSWER,
    *,
    begins: bool = True,
) -> list[int]:
    """What an engine answers that has computed the prompt before and continues from its own cache.

    ``begins``: with the answer's first token in its prompt, as an engine that was handed it. Then both compute equally
    many tokens after the boundary: in bfloat16 a gated delta net's state depends on that. With a prompt of whole units
    that would be another boundary.
    """
    begun: list[int] = []
    if begins and (len(prompt) % hashing.align or not hashing.boundaries):
        first = await driver.leg(worker, LegKind.AGGREGATED, prompt, fields={"max_tokens": 1})
        assert first.report.cached_tokens == hashing.usable(len(prompt)), first.report
        begun = first.token_ids
    fields = {"max_tokens": tokens - len(begun)}
    answer = await driver.leg(worker, LegKind.AGGREGATED, [*prompt, *begun], fields=fields)
    assert answer.report.cached_tokens == hashing.usable(len(prompt) + len(begun)), answer.report
    return begun + answer.token_ids


async def offered(driver: Driver, prompt: Sequence[int], *, stream: bool) -> tuple[list[int], KvTransferReport]:
    """The prefill leg ends before the decode leg begins, which reads the offer."""
    offer = await driver.offered(PREFILL, prompt)
    answer = await driver.taken(DECODE, prompt, offer, fields={"stream": stream, "max_tokens": ANSWER})
    return answer.token_ids, transfer_report_of(answer)


async def followed(driver: Driver, prompt: Sequence[int], *, stream: bool) -> tuple[list[int], KvTransferReport]:
    """The decode leg reads while the prefill leg computes."""
    await driver.start(PREFILL, LegKind.PREFILL, prompt, kv_offer=False)
    source = driver.source(PREFILL, follow=True)
    answer = await driver.leg(
        DECODE, LegKind.DECODE, prompt, kv_sources=[source], fields={"stream": stream, "max_tokens": ANSWER}
    )
    return answer.token_ids, transfer_report_of(answer)


async def prove_sizes(driver: Driver, record: WorkerRecord) -> None:
    """From the worker's record a router predicts the bytes of a handoff, here behind the widest window."""
    peer = await handshake_of(driver, PREFILL)
    boundary = 4096 * lcm(*(group.block_size for group in peer.groups))
    assert record.kv_boundary_bytes > 0
    assert record.kv_boundary_bytes + boundary * record.kv_token_bytes == bytes_at(peer, boundary)


async def prove_handoffs(driver: Driver, hashing: HashScheme, prompts: Sequence[int], *, looks_up: bool = True) -> None:
    """Offered and followed: the tokens are those of an engine's own hit, and the bytes read are exactly those that the
    boundary needs. With full attention alone the block that ends with the prompt is read as well. ``looks_up``: whether
    the engines find blocks by hash; others are compared with an engine that computes everything, and are not followed.
    """
    peer = await handshake_of(driver, DECODE)
    answers = []
    for number, tokens in enumerate(prompts):
        for hand_over in (offered, followed) if looks_up else (offered,):
            prompt = random_prompt(f"{hand_over.__name__} {tokens}", tokens)
            token_ids, report = await hand_over(driver, prompt, stream=bool(number % 2))
            boundary = hashing.usable(tokens) if hashing.boundaries else tokens // hashing.align * hashing.align
            about = (hand_over.__name__, tokens, report)
            assert report.fetched_tokens in {boundary, tokens - 1}, about
            assert sum(read.bytes for read in report.reads) == bytes_at(peer, boundary), (about, peer.groups)
            if looks_up:
                own = await from_own_cache(driver, PREFILL, prompt, hashing, begins=report.first_token_received)
            else:
                own = await driver.alone(PREFILL, prompt, ANSWER)
            assert token_ids == own, about
            answers.append(tuple(token_ids))
    assert len(set(answers)) == len(answers), "the answers do not depend on the prompts"


async def prove_too_short(driver: Driver, hashing: HashScheme) -> None:
    """A prompt within its first unit has no boundary: the decode worker computes it."""
    prompt = random_prompt("short", hashing.align - 1)
    answer = await driver.leg(PREFILL, LegKind.PREFILL, prompt)
    assert transfer_report_of(answer).offer is None
    alone = await driver.alone(PREFILL, prompt)
    answer = await driver.leg(DECODE, LegKind.DECODE, prompt, kv_sources=[driver.source(PREFILL)])
    assert (answer.token_ids, transfer_report_of(answer).fetched_tokens) == (alone, 0)


Forge = Callable[[GroupBlocks, GroupBlocks], list[int]]
"""From a group's blocks in an offer, and in that of another prompt, what to offer instead."""


def left_out(blocks: GroupBlocks, _other: GroupBlocks) -> list[int]:
    """Memory that nobody has written, in place of the state or of the oldest block of a window."""
    return [NULL_BLOCK, *unpack_block_ids(blocks.block_ids)[1:]]


def of_another_position(_blocks: GroupBlocks, other: GroupBlocks) -> list[int]:
    """The state after other tokens."""
    return unpack_block_ids(other.block_ids)


async def prove_controls(driver: Driver, hashing: HashScheme, kind: KvGroupKind, forges: Sequence[Forge]) -> None:
    """With a wrong block in each group of the kind the answer is another one, so the right answers prove something."""
    groups = (await handshake_of(driver, PREFILL)).groups
    chosen = [number for number, group in enumerate(groups) if group.kind is kind]
    assert chosen
    for forge in forges:
        prompt = random_prompt(f"control {forge.__name__}", lengths(hashing, 300)[0])
        other = await driver.offered(PREFILL, random_prompt("other", lengths(hashing, 200)[0]))
        offer = await driver.offered(PREFILL, prompt)
        forged = forge_offer(offer, other, chosen, forge)
        answer = await driver.taken(DECODE, prompt, forged, fields={"max_tokens": CONTROLLED})
        right = await from_own_cache(driver, PREFILL, prompt, hashing, CONTROLLED)
        assert transfer_report_of(answer).fetched_tokens == hashing.usable(len(prompt))
        assert answer.token_ids[1:] != right[1:], f"{forge.__name__}: the first token is the prefill leg's"


def forge_offer(offer: KvOffer, other: KvOffer, chosen: Sequence[int], forge: Forge) -> KvOffer:
    made = [
        msgspec.structs.replace(blocks, block_ids=pack_block_ids(forge(blocks, other.groups[number])))
        if number in chosen
        else blocks
        for number, blocks in enumerate(offer.groups)
    ]
    return msgspec.structs.replace(offer, groups=made)


async def prove_states(pair: Pair, driver: Driver) -> None:
    """All proofs of a model with a recurrent state."""
    assert pair.prefill.record is not None
    await prove_boundaries(driver, pair.prefill.record, KvGroupKind.STATE, [left_out, of_another_position])


async def prove_boundaries(driver: Driver, record: WorkerRecord, kind: KvGroupKind, forges: Sequence[Forge]) -> None:
    """All of these proofs, of short prompts. ``record``: the prefill worker's."""
    await prove_sizes(driver, record)
    await prove_handoffs(driver, record.hashing, lengths(record.hashing, 300))
    await prove_too_short(driver, record.hashing)
    await prove_controls(driver, record.hashing, kind, forges)
