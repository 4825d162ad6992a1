"""What many tests share."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from hypothesis import settings
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

from tests.support.nats_server import NatsServer

ROOT = Path(__file__).parents[1]

# How long an example takes says how busy the machine is, and nothing about what is promised.
settings.register_profile("baton", deadline=None)
settings.load_profile("baton")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadScopeScheduling:
    """Of the processes that share the tests out, one has all real engines, which are many cores' work already."""
    return _ByFile(config, log)


class _ByFile(LoadScopeScheduling):
    """A file's tests stay together, and so do those of all files that share something costly."""

    def _split_scope(self, nodeid: str) -> str:
        return _group(nodeid.partition("::")[0])


@cache
def _group(path: str) -> str:
    if path.startswith("tests/nightly/chaos/"):
        return "chaos"
    return "engines" if path.startswith("tests/engines/") else path


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What waits most comes first, where tests are shared out."""
    if hasattr(config, "workerinput"):
        items.sort(key=_turn)


def _turn(item: pytest.Item) -> int:
    path = item.path.relative_to(ROOT)
    return 0 if _group(str(path)) == "engines" else 1 if path.parts[1] in ("e2e", "nightly") else 2


@pytest.fixture(scope="session", autouse=True)
def state_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What a worker has kept in this user's state folder is no concern of a test, nor the other way round."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture
def nats_server(tmp_path: Path) -> Iterator[NatsServer]:
    with NatsServer(tmp_path) as server:
        yield server


@pytest.fixture(autouse=True)
def _heard_logs() -> None:
    """vLLM's parsers and its server, and our own command line, silence loggers of their process: every test's here."""
    logging.disable(logging.NOTSET)
    root = logging.getLogger()
    root.setLevel(logging.WARNING)
    for handler in root.handlers:
        handler.setLevel(logging.NOTSET)
