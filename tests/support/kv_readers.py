"""A KV reader in its own process, over real NIXL: connects to peers and reads from them as an engine does."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import msgspec

from connector.messages import Orders, Peer, Read
from connector.worker.transfer_thread import Copier, TransferThread
from shared.contracts.kv_exchange import GROUP, KvHandshake
from tests.support.kv_engines import RankMemory, ReadingRank, Shape

ANSWER_S_MAX = 240.0
END_S_MAX = 60.0
_peers = list[KvHandshake]


@dataclass
class Reader:
    process: BaseProcess
    pipe: Connection

    def connect(self, peers: Sequence[KvHandshake]) -> dict[str, str]:
        """The failure of each peer by its worker id; empty: connected and read. Raises EOFError when the process has
        ended.
        """
        self.pipe.send_bytes(msgspec.msgpack.encode(list(peers)))
        if not self.pipe.poll(ANSWER_S_MAX):
            raise TimeoutError(f"the reader has not answered within {ANSWER_S_MAX} s")
        return msgspec.msgpack.decode(self.pipe.recv_bytes(), type=dict[str, str])

    def close(self) -> None:
        self.pipe.close()
        self.process.kill()
        self.process.join(END_S_MAX)


def start_reader(shape: Shape) -> Reader:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["connector.transfer.nixl_agent", "tests.support.kv_holders"])
    ours, theirs = context.Pipe()
    process = context.Process(target=read, args=(theirs, shape, dict(os.environ)), daemon=True)
    process.start()
    theirs.close()
    return Reader(process, ours)


def read(pipe: Connection, shape: Shape, environ: Mapping[str, str]) -> None:
    """Main function of the process: ends with its parent, or with its transfer thread."""
    from connector.transfer.nixl_agent import NixlAgent

    os.environ.update(environ)
    agent = NixlAgent(f"reader-{os.getpid()}")
    reading = ReadingRank(RankMemory(shape, 0))
    own = reading.own(agent)
    transfers = TransferThread(lambda: Copier(agent, own, time.monotonic))
    while True:
        try:
            peers = msgspec.msgpack.decode(pipe.recv_bytes(), type=_peers)
        except EOFError:
            return
        pipe.send_bytes(msgspec.msgpack.encode(connect_and_read(transfers, peers)))


def connect_and_read(transfers: TransferThread, peers: Sequence[KvHandshake]) -> dict[str, str]:
    transfers.submit(Orders(connect=[Peer(handshake=peer, clock_ahead_s=0.0) for peer in peers]))
    failures: dict[str, str] = {}
    while len(failures) < len(peers):
        failures |= {ended.peer[0]: ended.failure for ended in transfers.take_results(wait_s=1.0).connected}
    read_ids = {number: peer.worker_id for number, peer in enumerate(peers) if not failures[peer.worker_id]}
    for number in read_ids:
        peer = peers[number]
        order = Read(number, (peer.worker_id, peer.epoch), [1], [1], time.monotonic() + ANSWER_S_MAX, GROUP, 1)
        transfers.submit(Orders(reads=[order]))
    while read_ids:
        for part in transfers.take_results(wait_s=1.0).parts:
            failures[read_ids.pop(part.read_id)] = part.failure
    return failures


def load_without_trial(metadata: bytes) -> int | None:
    """Exit code of a process that loads the metadata as an engine would without a trial."""
    process = multiprocessing.get_context("forkserver").Process(target=_load, args=(metadata,), daemon=True)
    process.start()
    process.join(END_S_MAX)
    process.kill()
    return process.exitcode


def _load(metadata: bytes) -> None:
    from connector.transfer.agent import TransferFailed
    from connector.transfer.nixl_agent import open_read_agent

    try:
        open_read_agent(f"loading-{os.getpid()}", [], metadata)
    except TransferFailed:
        return
