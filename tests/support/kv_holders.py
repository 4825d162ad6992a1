"""A KV holder in its own process, over real NIXL: behaves to readers like an engine."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import msgspec

from shared.contracts.kv_exchange import KvHandshake
from tests.support.kv_engines import RankMemory, Shape, handshake
from tests.support.processes import freeze

START_S_MAX = 120.0
END_S_MAX = 60.0


@dataclass
class Holder:
    """All ranks of one engine, in one process."""

    process: BaseProcess
    pipe: Connection
    handshake: KvHandshake

    def freeze(self) -> None:
        freeze(self.process.pid or 0)

    def go_on(self) -> None:
        os.kill(self.process.pid or 0, signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.join(END_S_MAX)
        assert self.process.exitcode is not None

    def close(self) -> None:
        self.pipe.close()
        self.kill()


def start_holder(shape: Shape, worker_id: str = "holder", epoch: int = 1) -> Holder:
    """Start a holder; its memory is filled and readable on return. Holders are forked from one process that has imported
    NIXL and used none of it.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["connector.transfer.nixl_agent", "tests.support.kv_holders"])
    ours, theirs = context.Pipe()
    arguments = (theirs, shape, worker_id, epoch, dict(os.environ))
    process = context.Process(target=hold, args=arguments, daemon=True)
    process.start()
    theirs.close()
    if not ours.poll(START_S_MAX):
        process.kill()
        raise TimeoutError(f"no holder after {START_S_MAX} s")
    return Holder(process, ours, msgspec.msgpack.decode(ours.recv_bytes(), type=KvHandshake))


def hold(pipe: Connection, shape: Shape, worker_id: str, epoch: int, environ: Mapping[str, str]) -> None:
    """Main function of the process: runs until it is killed or its parent has ended."""
    from connector.transfer.nixl_agent import NixlAgent

    os.environ.update(environ)
    ranks, agents = [], []
    memories = [RankMemory(shape, rank) for rank in range(shape.ranks)]
    for memory in memories:
        memory.fill()
        agent = NixlAgent(f"{worker_id}-{epoch}-{memory.rank}-{os.getpid()}")
        agent.register(memory.regions())
        agents.append(agent)
        ranks.append(memory.described(agent.metadata()))
    pipe.send_bytes(msgspec.msgpack.encode(handshake(ranks, shape, worker_id, epoch)))
    try:
        pipe.recv_bytes()
    except EOFError:
        return
