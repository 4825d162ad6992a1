"""The limit of a handoff, measured where handoffs are: in the decode engine, over the memory that they use.

``PlainReads`` is the engine's transfer agent, which also remembers what it read. Told to, it reads all bytes of the
handoff before last once more, with one NIXL read of the same pieces for which everything was made beforehand: the same
two processes, pages and core, and bytes that no cache holds any more.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections import deque
from multiprocessing.connection import Client, Listener
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from connector.nixl_agent import BACKENDS, MEMORY, STATES, NixlAgent
from connector.transfer_port import Spans, TransferState

SOCKET = "KV_BENCH_PLAIN_READS"
"""Variable of the engine's environment: where it takes orders."""
REMEMBERED = 3
"""Handoffs."""
PROBE_BYTES_MAX = 4096
POLL_S = 0.000_05


class PlainRead(msgspec.Struct):
    """What was read, and in what time."""

    bytes: int
    pieces: int
    seconds: float


class PlainReads(NixlAgent):
    """See the module."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._handoffs: deque[list[tuple[str, Spans, Spans]]] = deque([[]], maxlen=REMEMBERED)
        self._listener = Listener(os.environ[SOCKET])
        threading.Thread(target=self._serve, name="plain-reads", daemon=True).start()

    def read(self, name: str, remote: Spans, local: Spans, *, device: str, remote_device: str) -> Any:
        """Remembered."""
        if int(remote[:, 1].sum()) > PROBE_BYTES_MAX:
            self._handoffs[-1].append((name, remote, local))
        return super().read(name, remote, local, device=device, remote_device=remote_device)

    def _serve(self) -> None:
        with self._listener.accept() as asking:
            while True:
                try:
                    again = asking.recv()
                except EOFError:
                    return
                asking.send_bytes(msgspec.msgpack.encode(self._again(again)))
                if again < 0:
                    self._handoffs.append([])

    def _again(self, which: int) -> PlainRead | None:
        if which < -len(self._handoffs) or not self._handoffs[which]:
            return None
        reads = self._handoffs[which]
        name = reads[0][0]
        there, here = (np.concatenate([read[side] for read in reads]) for side in (1, 2))
        agent = self._connections[name].agent
        descs = [agent.get_xfer_descs(spans, MEMORY["cpu"]) for spans in (here, there)]
        handle = agent.initialize_xfer("READ", *descs, name, backends=BACKENDS)
        began = time.perf_counter()
        agent.transfer(handle)
        while STATES[agent.check_xfer_state(handle)] is TransferState.RUNNING:
            time.sleep(POLL_S)
        took_s = time.perf_counter() - began
        agent.release_xfer_handle(handle)
        return PlainRead(int(there[:, 1].sum()), len(there), took_s)
