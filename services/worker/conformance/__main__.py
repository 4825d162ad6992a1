"""``python -m services.worker.conformance STORE``: whether a store worker does what stores must (docs/stores.md).

It needs a nats-server with JetStream, without keys, and nothing else: it is itself the worker whose KV the store keeps.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from contextlib import suppress
from importlib.util import find_spec

from connector.transfer.trial import import_nixl
from services.worker.conformance.checks import CHECKS, run
from services.worker.conformance.reference import MODEL, Reference
from shared.bus.nats_bus import connect_nats
from shared.contracts.workers import USUAL_BACKEND

NIXL_PACKAGES = ("nixl_cu13", "nixl_cu12")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m services.worker.conformance", description=__doc__)
    parser.add_argument("store", help=f"id of the store worker, which runs with WORKER_MODEL={MODEL}")
    parser.add_argument("--nats-url", default="nats://127.0.0.1:4222")
    parser.add_argument("--kv-backend", default=USUAL_BACKEND, help="NIXL's plug-in, as the store's WORKER_KV_BACKEND")
    parser.add_argument("--start-s", type=float, default=120.0, help="how long to wait for the store's start")
    parser.add_argument("--answer-s", type=float, default=5.0, help="time limit for each answer")
    given = parser.parse_args()
    sys.exit(asyncio.run(judge(given.store, given.nats_url, given.kv_backend, given.start_s, given.answer_s)))


async def judge(store: str, nats_url: str, backend: str, start_s: float, answer_s: float) -> int:
    """Prints a line for each check; the exit status."""
    nixl = import_nixl(next(filter(find_spec, NIXL_PACKAGES), "nixl"))
    bus = await connect_nats(nats_url, name="conformance", connect_s_max=answer_s)
    agent = nixl.NixlAgent(f"conformance-{id(bus)}", backend=backend)
    reference = Reference(bus, store, agent, backend, answer_s_max=answer_s)
    staying: asyncio.Task[None] | None = None
    try:
        await reference.open()
        staying = asyncio.create_task(reference.stay_registered(), name="stay-registered")
        try:
            await reference.connect(start_s)
        except TimeoutError:
            print(f"FAILED  start: {store} sent no handshake, or could not be connected to, within {start_s:g} s")  # noqa: T201
            return 1
        results = await run(reference)
    finally:
        if staying is not None:
            staying.cancel()
            with suppress(asyncio.CancelledError):
                await staying
        reference.close()
        await bus.close()
    for check, result in zip(CHECKS, results, strict=True):
        print(f"FAILED  {result.name}: {result.failure}" if result.failure else f"ok      {result.name}: {check.must}")  # noqa: T201
    return int(any(result.failure for result in results))


if __name__ == "__main__":
    main()
