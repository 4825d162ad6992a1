"""One fleet for all tests of the short form: it must recover from each one before the next."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tests.nightly.chaos.chaos import Run, opened_run
from tests.nightly.chaos.fleet import Size

T = TypeVar("T")

SHORT = Size(prefill=2, decode=2, both=1, other=2, stores=1, adapter=True, planner=True, keys=True)
RUN_S_MAX = 700.0


class Stage:
    """The fleet's event loop in a thread of its own: its lines carry on between two tests."""

    def __init__(self) -> None:
        self.run: Run
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="chaos", daemon=True)
        self._thread.start()

    def play(self, act: Coroutine[Any, Any, T]) -> T:
        """Run it on the loop, to its end."""
        return asyncio.run_coroutine_threadsafe(act, self._loop).result(RUN_S_MAX)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()


@pytest.fixture(scope="session")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """Eight workers, two routers, two orchestrators and a collector, all ready."""
    yield from staged(SHORT, tmp_path_factory.mktemp("chaos"))


def staged(size: Size, folder: Path) -> Iterator[Stage]:
    """A fleet of this size, ready, until the generator is closed."""
    stage = Stage()
    opening = opened_run(size, folder)
    stage.run = stage.play(opening.__aenter__())
    try:
        yield stage
    finally:
        stage.play(opening.__aexit__(None, None, None))
        stage.close()
