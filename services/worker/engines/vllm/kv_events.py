"""vLLM's KV events, from its ZMQ publisher in the EngineCore process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.asyncio
from vllm.distributed.kv_events import (
    MEDIUM_CPU,
    MEDIUM_GPU,
    MEDIUM_STORAGE,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEventBatch,
)

from services.worker.kv_events import EventTranslation, narrow_windows
from shared.contracts.kv_events import KvEvent, KvTier

EVENTS_QUEUED_MAX = 100_000
"""Batches in ZMQ's receive queue; vLLM's own bound is the same."""
READ_AT_ONCE_MAX = 64
"""Batches read in one turn of the event loop."""
READ_AFTER_S = 0.01
"""Pause after a batch has come. The engine sends it before the tokens of its step, which should not wait for it, and
most engines send more by then."""
REPLAY_S_MAX = 2.0
END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
TIERS = {None: KvTier.DEVICE, MEDIUM_GPU: KvTier.DEVICE, MEDIUM_CPU: KvTier.HOST, MEDIUM_STORAGE: KvTier.DISK}
"""Tiers by vLLM's name of the memory. The engine's own is called GPU, on a CPU too."""
REMOTE = "REMOTE"
"""Locality of a store that all engines share: its blocks are no reason to prefer one engine."""


class KvEventSource:
    """Reads events in order. Asks for a replay when some are missing, and clears all blocks when that fails."""

    def __init__(self, run_dir: Path) -> None:
        self.endpoint = f"ipc://{run_dir}/kv"
        self.replay_endpoint = f"ipc://{run_dir}/kv-replay"
        self._context = zmq.Context()  # type: ignore[attr-defined]
        self._socket = self._context.socket(zmq.SUB)  # type: ignore[attr-defined]
        self._socket.set_hwm(EVENTS_QUEUED_MAX)
        self._socket.subscribe(b"")
        self._socket.connect(self.endpoint)
        self._decoder = msgspec.msgpack.Decoder(KVEventBatch)
        self._translation = EventTranslation()
        self._default_group = 0
        """Group of events that name none."""
        self._next = 0

    def attach(self, groups: Sequence[tuple[int, bool, int]]) -> None:
        """Set the engine's KV cache groups (see ``blocks_of_windows``); before the engine gets requests."""
        full = [is_full for _size, is_full, _window in groups]
        self._translation = EventTranslation(full, narrow_windows(groups))
        self._default_group = next((group for group, is_full in enumerate(full) if is_full), 0)

    async def batches(self) -> AsyncIterator[list[KvEvent]]:
        """Changes in order, from the engine's first event on. One consumer."""
        while True:
            messages = self._received()
            if events := await self._events_of(messages):
                yield events
            if len(messages) == READ_AT_ONCE_MAX:
                await asyncio.sleep(0)
            else:
                await self._readable()
                await asyncio.sleep(READ_AFTER_S)

    async def _readable(self) -> None:
        """Until the next batch has come. Its signal stays until the batch is read, and would wake the loop again."""
        readable, loop, descriptor = asyncio.Event(), asyncio.get_running_loop(), self._socket.FD
        loop.add_reader(descriptor, readable.set)
        try:
            await readable.wait()
        finally:
            loop.remove_reader(descriptor)

    def _received(self) -> list[tuple[int, bytes]]:
        """Numbers and payloads that have come, without the future and the timer that zmq.asyncio makes for each. ZMQ
        signals again only when all were taken: with fewer than ``READ_AT_ONCE_MAX`` none is left.
        """
        messages: list[tuple[int, bytes]] = []
        try:
            while len(messages) < READ_AT_ONCE_MAX:
                _topic, number, payload = self._socket.recv_multipart(zmq.NOBLOCK)  # type: ignore[attr-defined]
                messages.append((int.from_bytes(number, "big"), payload))
        except zmq.error.Again:
            pass
        return messages

    async def _events_of(self, messages: list[tuple[int, bytes]]) -> list[KvEvent]:
        events: list[KvEvent] = []
        for seq, payload in messages:
            if seq > self._next:
                events += await self._recover(seq)
            if seq >= self._next:
                events += self._translate(payload)
                self._next = seq + 1
        return events

    def close(self) -> None:
        self._context.destroy(linger=0)

    async def _recover(self, until: int) -> list[KvEvent]:
        """The events from the first missing one to ``until``. If vLLM does not have all of them any more, a CLEARED
        event: that is safe, because routers then expect fewer blocks than the engine has.
        """
        missing = [payload for seq, payload in await self._replay(self._next) if seq < until]
        if len(missing) != until - self._next:
            return [self._translation.cleared()]
        return [event for payload in missing for event in self._translate(payload)]

    async def _replay(self, start: int) -> list[tuple[int, bytes]]:
        """The batches that vLLM still has from number ``start`` on; none if it does not answer in time."""
        batches: list[tuple[int, bytes]] = []
        socket = zmq.asyncio.Context.shadow(self._context).socket(zmq.DEALER)  # type: ignore[attr-defined]
        try:
            socket.connect(self.replay_endpoint)
            await socket.send_multipart((b"", start.to_bytes(8, "big")))
            async with asyncio.timeout(REPLAY_S_MAX):
                while (message := await socket.recv_multipart())[-2] != END_OF_REPLAY:
                    batches.append((int.from_bytes(message[-2], "big"), message[-1]))
        except TimeoutError:
            return []
        finally:
            socket.close(linger=0)
        return batches

    def _translate(self, payload: bytes) -> list[KvEvent]:
        return [told for event in self._decoder.decode(payload).events for told in self.translate(event)]

    def translate(self, event: Any) -> list[KvEvent]:
        """What a router is told of one of vLLM's events."""
        if isinstance(event, AllBlocksCleared):
            return [self._translation.cleared()]
        tier = _tier(event)
        if tier is None:
            return []
        group = self._default_group if event.group_idx is None else event.group_idx
        match event:
            case BlockStored():
                parent = _full_one(event.parent_block_hash)
                return self._translation.stored(_full(event.block_hashes), parent, tier, group)
            case BlockRemoved():
                return self._translation.removed(_full(event.block_hashes), tier, group)
            case _:
                return []


def _tier(event: BlockStored | BlockRemoved) -> KvTier | None:
    """None for blocks of other engines."""
    if event.locality == REMOTE:
        return None
    return TIERS.get(event.medium if event.medium is None else event.medium.upper())


def _full(hashes: Iterable[Any]) -> list[bytes]:
    return [bytes(full) for full in hashes]


def _full_one(full: Any) -> bytes | None:
    return None if full is None else bytes(full)
