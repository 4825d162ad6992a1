"""One simulated engine directly behind uvicorn: the reference of the router's latency.

``python -m bench.direct_engine --port 8001`` reads the worker's WORKER_* variables.
"""

from __future__ import annotations

import argparse
import contextlib

import uvicorn
import uvloop

from services.worker.engines.port import Identity
from services.worker.engines.simulated.engine import start_engine
from services.worker.settings import Settings
from shared.contracts.ids import Epoch, WorkerId
from shared.runtime.settings import load, load_common


class Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self):
        yield


async def serve(port: int) -> None:
    engine = await start_engine(
        load(Settings, "WORKER_"), load_common(), lambda _text: None, identity=Identity(WorkerId("w1"), Epoch(1))
    )
    config = uvicorn.Config(
        engine.app, port=port, http="httptools", loop="none", lifespan="off", log_config=None, access_log=False
    )
    await Server(config).serve()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    uvloop.run(serve(parser.parse_args().port))


if __name__ == "__main__":
    main()
