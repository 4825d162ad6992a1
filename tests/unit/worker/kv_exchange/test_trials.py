"""Metadata that ends a process, or takes too much of the machine, is deadly; nothing that passed is tried again."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from connector.transfer.trial import FREED_CONTENTS, TEXT_CHARS_MAX
from services.worker.kv_exchange.trials import PIECES_MAX, VERDICTS_MAX, Outcome, Trials, Verdict, trial_command
from shared.contracts.kv_exchange import GROUP, KvHandshake, KvLayer, KvPlane, KvRank
from tests.unit.worker.kv_exchange.fakes import handshake

FAKE = trial_command("tests.support.fake_nixl", "UCX")
TRIES = len(FREED_CONTENTS)
SOON_S_MAX = 30.0


def peer(*metadata: bytes, device: str = "cpu", planes: int = 0) -> KvHandshake:
    layer = KvLayer(
        name="layer",
        group=GROUP,
        base=4096,
        block_stride=8,
        planes=[KvPlane(offset=0, head_bytes=8, heads=1, total=1)] * planes,
    )
    ranks = [
        KvRank(rank=rank, agent=agent, device=device, device_id=0, layers=[layer])
        for rank, agent in enumerate(metadata)
    ]
    return handshake(ranks=ranks)


OWN = peer(b"own")


@pytest.fixture
def loaded(tmp_path, monkeypatch) -> Path:
    """What was loaded, one a line."""
    log = tmp_path / "loaded"
    monkeypatch.setenv("FAKE_NIXL_LOG", str(log))
    log.touch()
    return log


@pytest.fixture
async def trials(loaded) -> AsyncIterator[Trials]:
    async with Trials(FAKE) as trials:
        yield trials


async def tried(trials: Trials, *metadata: bytes) -> Verdict:
    async with asyncio.timeout(SOON_S_MAX):
        return await trials.verdict(peer(*metadata), OWN)


async def test_metadata_that_can_be_loaded_is_tried_once(trials, loaded):
    for metadata in (b"a", b"b", b"a", b"a"):
        assert await tried(trials, metadata) == Verdict(Outcome.PASSED)

    assert loaded.read_bytes().split() == [b"a"] * TRIES + [b"b"] * TRIES


async def test_the_metadata_of_each_rank_is_tried(trials, loaded):
    assert await tried(trials, b"a", b"b", b"c") == Verdict(Outcome.PASSED)
    assert (await tried(trials, b"a", b"segfault")).outcome is Outcome.DEADLY

    assert loaded.read_bytes().split() == [b"a", b"b", b"c"] * TRIES + [b"a", b"segfault"]


@pytest.mark.parametrize("metadata", [b"segfault", b"memory", b"exit", pytest.param(b"spin", marks=pytest.mark.slow)])
async def test_metadata_that_ends_a_process_is_deadly_and_not_tried_again(trials, loaded, metadata):
    for _ in range(2):
        assert (await tried(trials, metadata)).outcome is Outcome.DEADLY

    assert loaded.read_bytes().split() == [metadata]
    assert await tried(trials, b"honest") == Verdict(Outcome.PASSED)


@pytest.mark.parametrize(
    ("metadata", "why"),
    [
        (b"mismatch", "connecting: nixlBackendError NIXL_ERR_MISMATCH"),
        (b"\xff", "connecting: UnicodeDecodeError"),
        (b"late", "was not tried"),
        (b"out of memory", "was not tried"),
        (b"orphan", "was not tried: the process that tries metadata has ended"),
    ],
)
async def test_what_does_not_end_a_process_may_be_tried_again(trials, loaded, metadata, why):
    for _ in range(2):
        verdict = await tried(trials, metadata)
        assert verdict.outcome is Outcome.REFUSED
        assert why in verdict.why
        assert len(verdict.why) < 2 * TEXT_CHARS_MAX

    assert loaded.read_bytes().splitlines() == [metadata] * 2
    assert await tried(trials, b"honest") == Verdict(Outcome.PASSED)


async def test_a_child_that_cannot_be_reaped_holds_nothing_up(loaded, monkeypatch):
    monkeypatch.setenv("FAKE_NIXL_UNREAPED", "1")
    async with Trials(FAKE) as trials:
        assert await tried(trials, b"a") == Verdict(Outcome.PASSED)
        assert (await tried(trials, b"segfault")).outcome is Outcome.DEADLY
        assert await tried(trials, b"b") == Verdict(Outcome.PASSED)


async def test_the_peers_memory_is_read(trials):
    async def verdict(metadata: bytes) -> Verdict:
        return await trials.verdict(peer(metadata, planes=2), OWN)

    assert (await verdict(b"read-segfault")).outcome is Outcome.DEADLY
    assert await verdict(b"elsewhere") == Verdict(Outcome.REFUSED, "reading: nixlBackendError NIXL_ERR_NOT_FOUND")
    assert await verdict(b"away") == Verdict(Outcome.REFUSED, "reading: nixlBackendError NIXL_ERR_REMOTE_DISCONNECT")
    assert (await trials.verdict(peer(b"read-segfault", planes=2, device="cuda"), OWN)).outcome is Outcome.PASSED


async def test_a_refusal_is_believed_only_where_a_trial_can_know(trials):
    """It has no GPU."""
    for of_peer, of_own in (("cuda", "cpu"), ("cpu", "cuda")):
        verdict = await trials.verdict(peer(b"mismatch", device=of_peer), peer(b"own", device=of_own))
        assert verdict == Verdict(Outcome.PASSED)
    deadly = await trials.verdict(peer(b"segfault", device="cuda"), OWN)
    assert deadly.outcome is Outcome.DEADLY


async def test_a_trial_that_hangs_delays_no_other(trials, loaded):
    hanging = asyncio.create_task(tried(trials, b"hang"))
    async with asyncio.timeout(SOON_S_MAX):
        while loaded.read_bytes() != b"hang\n":
            await asyncio.sleep(0.01)

    assert await tried(trials, b"honest") == Verdict(Outcome.PASSED)
    assert not hanging.done()
    hanging.cancel()


async def test_a_handshake_of_too_many_pieces_is_not_tried(trials, loaded):
    verdict = await trials.verdict(peer(b"a", planes=PIECES_MAX + 1), OWN)

    assert (verdict.outcome, loaded.read_bytes()) == (Outcome.REFUSED, b"")


async def test_a_bounded_number_of_verdicts_is_remembered(trials, loaded):
    trials._verdicts = {number.to_bytes(32): Verdict(Outcome.PASSED) for number in range(VERDICTS_MAX)}

    for _ in range(2):
        await tried(trials, b"a")

    assert len(trials._verdicts) == VERDICTS_MAX
    assert loaded.read_bytes().split() == [b"a"] * TRIES


async def test_a_process_that_cannot_be_started_refuses(tmp_path):
    async with Trials([str(tmp_path / "nothing")]) as trials:
        verdict = await tried(trials, b"a")

    assert verdict.outcome is Outcome.REFUSED
    assert "No such file" in verdict.why


async def test_a_broken_environment_says_nothing_about_the_metadata(monkeypatch):
    monkeypatch.setenv("FAKE_NIXL_BROKEN", "1")

    async with Trials(FAKE) as trials:
        verdict = await tried(trials, b"segfault")

    assert verdict.outcome is Outcome.REFUSED
    assert "no plugins" in verdict.why


async def test_the_process_ends_with_its_worker(trials):
    await tried(trials, b"a")
    assert trials._server is not None
    pid = trials._server._process.pid

    async with asyncio.timeout(SOON_S_MAX):
        await trials.__aexit__()

    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
