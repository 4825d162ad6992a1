"""The hosts of an engine meet, and each learns when another is gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest

from services.worker.engines.port import EngineDead, EngineRefused
from services.worker.engines.vllm.nodes import Followers, Membership, join
from services.worker.meeting import Hello, shared_settings
from services.worker.settings import Settings
from shared.contracts.ids import Epoch
from shared.contracts.workers import Role
from tests.support.nats_server import free_port

EPOCH, PORT = Epoch(7), 1234
SOON_S_MAX = 30.0


@pytest.fixture
def head() -> Settings:
    return Settings(
        worker_id="a-decode-1",
        role=Role.DECODE,
        nodes=3,
        tensor_parallel_size=3,
        head_address=f"127.0.0.1:{free_port()}",
    )


def of_node(head: Settings, node: int, **changes: object) -> Settings:
    own = {"worker_id": f"host-{node}", "role": Role.BOTH, "cpu_cores": "1", **changes}
    return msgspec.structs.replace(head, node=node, **own)


async def joined(settings: Settings) -> Membership:
    async with asyncio.timeout(SOON_S_MAX):
        return await join(settings)


@asynccontextmanager
async def all_there(head: Settings) -> AsyncIterator[tuple[Followers, list[Membership]]]:
    coming = [asyncio.create_task(joined(of_node(head, node))) for node in (2, 1)]
    async with asyncio.timeout(SOON_S_MAX):
        followers = await Followers.gather(head, EPOCH, PORT, lambda _detail: None)
        memberships = await asyncio.gather(*coming)
    yield followers, list(memberships)
    for one in memberships:
        one.close()
    await followers.close()


async def test_all_hosts_learn_where_to_meet_and_the_workers_role_once_all_have_come(head: Settings):
    async with all_there(head) as (followers, memberships):
        assert [(one.epoch, one.port, one.role) for one in memberships] == [(EPOCH, PORT, Role.DECODE)] * 2
        assert not followers.lost.done()


async def test_the_worker_learns_that_a_host_is_gone(head: Settings):
    async with all_there(head) as (followers, memberships):
        said: list[str] = []
        followers.on_lost(said.append)

        memberships[0].close()

        async with asyncio.timeout(SOON_S_MAX):
            assert "node 2 of the engine is gone" in await followers.lost
        followers.on_lost(said.append)
        await asyncio.sleep(0)
        assert len(said) == 2


async def test_a_start_ends_when_a_host_is_gone(head: Settings):
    async with all_there(head) as (followers, memberships):
        starting = asyncio.create_task(followers.unless_lost(asyncio.sleep(3600.0)))
        memberships[1].close()

        async with asyncio.timeout(SOON_S_MAX):
            with pytest.raises(EngineDead, match="node 1 of the engine is gone"):
                await starting
        assert await followers.unless_lost(asyncio.sleep(0, "a start that has ended")) == "a start that has ended"


async def test_a_host_learns_that_the_worker_has_ended(head: Settings):
    async with all_there(head) as (followers, memberships):
        waiting = [asyncio.create_task(one.until_lost()) for one in memberships]
        await asyncio.sleep(0)
        assert not any(task.done() for task in waiting)

        await followers.close()

        async with asyncio.timeout(SOON_S_MAX):
            await asyncio.gather(*waiting)


async def test_a_host_with_other_settings_is_refused_for_good(head: Settings):
    gathering = asyncio.create_task(Followers.gather(head, EPOCH, PORT, lambda _detail: None))

    with pytest.raises(
        EngineRefused, match=r"WORKER_REVISION: all parts of the engine at .* need the same, but node 1 has"
    ):
        await joined(of_node(head, 1, revision="other"))
    gathering.cancel()


async def test_a_host_that_is_there_is_not_replaced_until_it_has_ended(head: Settings):
    gathering = asyncio.create_task(Followers.gather(head, EPOCH, PORT, lambda _detail: None))
    async with asyncio.timeout(SOON_S_MAX):
        _reader, first = await connected(head)
        first.write(hello(head, 2))
        again, _writer = await connected(head)
        _writer.write(hello(head, 2))
        assert b"is here already" in await again.read()
        first.close()
        memberships = await asyncio.gather(joined(of_node(head, 2)), joined(of_node(head, 1)))
        followers = await gathering
    assert not followers.lost.done()
    for one in memberships:
        one.close()
    await followers.close()


def hello(head: Settings, number: int) -> bytes:
    return msgspec.json.encode(Hello(number, shared_settings(head))) + b"\n"


async def connected(head: Settings) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    while True:
        try:
            return await asyncio.open_connection(*head.meeting)
        except OSError:
            await asyncio.sleep(0)


@pytest.mark.parametrize(("said", "answer"), [(b'{"node": "one"}\n', b""), (b"x" * 100_000, b""), (None, b"no node 3")])
async def test_whoever_says_nothing_right_is_disconnected(head: Settings, said: bytes | None, answer: bytes):
    gathering = asyncio.create_task(Followers.gather(head, EPOCH, PORT, lambda _detail: None))
    async with asyncio.timeout(SOON_S_MAX):
        reader, writer = await connected(head)
        writer.write(said or hello(head, 3))
        assert answer in await reader.read()
    writer.close()
    gathering.cancel()


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"head_address": "host:1"}, "WORKER_HEAD_ADDRESS"),
        ({"head_address": "0.0.0.0:1"}, "WORKER_HEAD_ADDRESS"),
        ({"head_address": "10.0.0.1"}, "WORKER_HEAD_ADDRESS"),
        ({"node": 3}, "WORKER_NODE: the hosts of the engine are 0 to 2"),
        ({"tensor_parallel_size": 4}, "4 ranks .* cannot be shared out equally over 3 hosts"),
        ({"data_parallel_size": 2, "data_parallel_group": "g"}, "WORKER_NODES: each worker of a data parallel group"),
        ({"connector": "upstream"}, "WORKER_NODES: only a vLLM engine with Baton's KV exchange"),
        ({"engine": "simulated"}, "WORKER_NODES"),
        ({"role": Role.STORE}, "WORKER_NODES"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(head: Settings, changes: dict[str, object], why: str):
    with pytest.raises(ValueError, match=why):
        Settings(**{**msgspec.structs.asdict(head), **changes})
