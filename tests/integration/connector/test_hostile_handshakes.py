"""What a peer with a valid key may send as its handshake costs a reader this peer and nothing else, over real NIXL."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from importlib.util import find_spec

import pytest
from msgspec.structs import replace

from services.worker.kv_exchange.trials import Outcome, Trials, Verdict, trial_command
from shared.contracts.kv_exchange import KvHandshake
from tests.support.hostile_handshakes import FORGERIES, PIECE_LENGTH, deadly, mutated, with_metadata, with_random_key
from tests.support.kv_engines import Shape
from tests.support.kv_holders import Holder, start_holder
from tests.support.kv_readers import Reader, load_without_trial, start_reader

PACKAGE = next(filter(find_spec, ("nixl_cu13", "nixl_cu12")), "nixl")
SHARED_MEMORY = {"cma", "posix", "sysv", "knem", "xpmem"}
"""UCX's transports on one host."""
pytestmark = pytest.mark.skipif(find_spec("nixl") is None, reason="NIXL is not installed")

MUTATIONS = 40
KEYS = 16
SEED = "hostile-metadata"
TRIALS_S_MAX = 240.0


@pytest.fixture(scope="module")
def holder() -> Iterator[Holder]:
    holder = start_holder(Shape())
    yield holder
    holder.close()


@pytest.fixture
def reader() -> Iterator[Reader]:
    reader = start_reader(Shape())
    yield reader
    reader.close()


@pytest.fixture
async def trials() -> AsyncIterator[Trials]:
    async with Trials(trial_command(PACKAGE, "UCX")) as trials:
        yield trials


async def tried(trials: Trials, peers: Sequence[KvHandshake], own: KvHandshake) -> list[Verdict]:
    async with asyncio.timeout(TRIALS_S_MAX):
        return await asyncio.gather(*(trials.verdict(peer, own) for peer in peers))


@pytest.mark.parametrize("name", [name for name in FORGERIES if name != "deadly"])
def test_a_reader_outlives_a_forged_handshake(holder, reader, name):
    """Without a trial, which an engine's own bounds and errors do not need."""
    forge, fault = FORGERIES[name]
    evil = replace(forge(holder.handshake), worker_id="evil")

    assert fault in reader.connect([evil])["evil"]
    assert fault in reader.connect([evil])["evil"], "the second time"
    assert reader.connect([holder.handshake]) == {"holder": ""}


async def test_a_reader_outlives_mutated_metadata_that_passes_its_trial(holder, reader, trials):
    """Some end a process when it loads them, others when it reads with them."""
    metadata = holder.handshake.ranks[0].agent
    hostile = [mutated(metadata, f"{SEED}-{number}") for number in range(MUTATIONS)]
    if PIECE_LENGTH in metadata:
        hostile += [with_random_key(metadata, f"{SEED}-{number}") for number in range(KEYS)]
    hostile.append(deadly(metadata))
    assert (load_without_trial(hostile[-1]) or 0) < 0
    evil = [
        replace(with_metadata(holder.handshake, one), worker_id=f"evil-{number}") for number, one in enumerate(hostile)
    ]

    verdicts = await tried(trials, evil, holder.handshake)
    passed = [peer for peer, verdict in zip(evil, verdicts, strict=True) if verdict.outcome is Outcome.PASSED]
    await asyncio.to_thread(reader.connect, passed)

    outcomes = [verdict.outcome for verdict in verdicts]
    print(f"\nof {len(evil)}:", {outcome.value: outcomes.count(outcome) for outcome in Outcome})
    assert "ends a process (exit status -11)" in verdicts[-1].why
    (honest,) = await tried(trials, [holder.handshake], holder.handshake)
    assert honest.outcome is Outcome.PASSED
    assert honest.transport.partition("/")[0] in SHARED_MEMORY
    assert await asyncio.to_thread(reader.connect, [holder.handshake]) == {"holder": ""}


async def test_an_honest_peer_that_freezes_or_ends_is_not_deadly(trials):
    holder = start_holder(Shape())
    holder.freeze()
    (frozen,) = await tried(trials, [holder.handshake], holder.handshake)
    holder.close()
    ended_peer = replace(holder.handshake, ranks=holder.handshake.ranks * 2)
    (ended,) = await tried(trials, [ended_peer], holder.handshake)

    assert Outcome.DEADLY not in {frozen.outcome, ended.outcome}


async def test_memory_that_the_metadata_does_not_have_is_refused(holder, trials):
    """A trial of a read that begins nowhere would not use the keys of the rest."""
    rank = holder.handshake.ranks[0]
    first, *others = rank.layers
    elsewhere = replace(rank, layers=[*others, replace(first, base=first.base + (1 << 40))])

    (verdict,) = await tried(trials, [replace(holder.handshake, ranks=[elsewhere])], holder.handshake)

    assert verdict.outcome is Outcome.REFUSED
    assert "NOT_FOUND" in verdict.why
