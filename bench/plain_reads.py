"""A plain read to compare handoffs with, measured where they are: in the decode engine, over the memory that they use.

``PlainReads`` is the engine's transfer agent, which also remembers what it read. On command it reads all bytes of the
handoff before last again, with one prepared NIXL read of the same pieces: the same
two processes, pages and core, and bytes that no CPU cache holds any more. The engine must be idle meanwhile.
"""

from __future__ import annotations

import json
import os
import shlex
import threading
import time
from collections import deque
from multiprocessing.connection import Client, Listener
from typing import Any

import msgspec
import numpy as np

from connector.transfer.agent import Spans, TransferFailed, TransferState
from connector.transfer.nixl_agent import MEMORY, NixlAgent

SOCKET = "KV_BENCH_PLAIN_READS"
"""Variable of the engine's environment: where it takes orders."""
BEGIN, END, AGAIN = "begin", "end", "again"
REMEMBERED = 2
POLL_S = 0.000_05
KV_TRANSFER = {
    "kv_connector": "BatonConnector",
    "kv_connector_module_path": "services.worker.engines.vllm.engine_process",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
    "kv_connector_extra_config": {"agent": "bench.plain_reads:PlainReads"},
}
ENGINE_ARGS = f"--kv-transfer-config {shlex.quote(json.dumps(KV_TRANSFER))}"
"""Of the engine that shall use it."""


class PlainRead(msgspec.Struct):
    """What was read, and in what time."""

    bytes: int
    pieces: int
    seconds: float


class PlainReads(NixlAgent):
    """NIXL's agent, which remembers the reads of each handoff."""

    def __init__(self, name: str, *, backend: str) -> None:
        super().__init__(name, backend=backend)
        self._handoffs: deque[list[tuple[str, Spans, Spans]]] = deque(maxlen=REMEMBERED)
        self._memories = MEMORY["cpu"], MEMORY["cpu"]  # There and here.
        self._remembers = False
        listener = Listener(os.environ[SOCKET])
        threading.Thread(target=self._serve, args=(listener,), name="plain-reads", daemon=True).start()

    def read(self, name: str, remote: Spans, local: Spans, *, device: str, remote_device: str) -> Any:
        if self._remembers:
            self._handoffs[-1].append((name, remote, local))
            self._memories = MEMORY[remote_device], MEMORY[device]
        return super().read(name, remote, local, device=device, remote_device=remote_device)

    def _serve(self, listener: Listener) -> None:
        with listener.accept() as asking:
            while True:
                try:
                    order = asking.recv()
                except EOFError:
                    return
                if order == BEGIN:
                    self._handoffs.append([])
                self._remembers = order == BEGIN
                asking.send_bytes(msgspec.msgpack.encode(self._again() if order == AGAIN else None))

    def _again(self) -> PlainRead | None:
        reads = self._handoffs[0]
        names = {name for name, _there, _here in reads}
        if len(self._handoffs) < REMEMBERED or len(names) != 1 or not names <= self._connections.keys():
            return None
        name = names.pop()
        there, here = (np.concatenate([read[side] for read in reads]) for side in (1, 2))
        peer = self._connections[name].first
        handle = peer.prepare(there, here, self._memories)
        began = time.perf_counter()
        peer.agent.transfer(handle)
        while (state := peer.state(handle)) is TransferState.RUNNING:
            time.sleep(POLL_S)
        took_s = time.perf_counter() - began
        peer.release(handle)
        if state is TransferState.FAILED:
            raise TransferFailed("a plain read failed")
        return PlainRead(int(there[:, 1].sum()), len(there), took_s)


class PlainReader:
    """The benchmark's side: marks the begin and end of handoffs, and orders the one before last to be read again."""

    def __init__(self, path: str) -> None:
        self._engine = Client(path)

    def begin(self) -> None:
        """Reads from now on belong to one handoff."""
        self._ask(BEGIN)

    def end(self) -> None:
        """The handoff is over."""
        self._ask(END)

    def again(self, size: int) -> PlainRead | None:
        """The handoff before last, read plainly; None if it was not of so many bytes, or its connection is gone."""
        found = self._ask(AGAIN)
        return found if found is not None and found.bytes == size else None

    def close(self) -> None:
        """Disconnect; the engine keeps running."""
        self._engine.close()

    def _ask(self, order: str) -> PlainRead | None:
        self._engine.send(order)
        return msgspec.msgpack.decode(self._engine.recv_bytes(), type=PlainRead | None)
