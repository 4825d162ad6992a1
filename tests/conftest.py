"""What many tests share."""

from __future__ import annotations

import ast
import gc
import logging
import signal
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import httpx._transports.default
import pytest
from _pytest.assertion import rewrite
from hypothesis import settings
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

from tests.support.examples import PROFILE
from tests.support.nats_server import NatsServer

ROOT = Path(__file__).parents[1]

settings.load_profile(PROFILE)
gc.set_threshold(50_000, 20, 50)  # The cyclic garbage collector took a tenth of the tests' time.
# Each client of httpx reads all root certificates (36 ms), and most tests with HTTP have a client of their own.
httpx._transports.default.create_ssl_context = cache(httpx._transports.default.create_ssl_context)

ENGINES = "engines"
SYSTEM = "a system with engines"
VLLM = "vLLM in this process"
GROUPS = {
    "tests/engines/system/": SYSTEM,
    "tests/engines/test_kv_faults.py": SYSTEM,
    "tests/engines/": ENGINES,
    "tests/nightly/engines/": ENGINES,
    "tests/gpu/": ENGINES,
    "tests/nightly/chaos/": "chaos",
    "tests/integration/connector/": VLLM,
    "tests/unit/connector/": VLLM,
    "tests/unit/worker/simulated/test_engine.py": VLLM,
    "tests/unit/worker/vllm/": VLLM,
    "tests/unit/worker/store/": VLLM,
    "tests/properties/connector/test_lent_blocks.py": VLLM,
}
"""Files whose paths begin so share what is costly: running engines, or vLLM or NIXL, which import torch, in their own
process. The first match counts. They make three groups, because one would still run when all other tests have ended.
"""
KILLS_ENGINES = "test_loss_and_drain.py"
ENGINES_S_MAX = 900.0
"""For a test that starts engines: on a busy machine they alone take seven minutes."""


def pytest_configure() -> None:
    """SIGTERM ends the tests as Ctrl-C does: fixtures stop the processes that they started."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


def pytest_sessionstart(session: pytest.Session) -> None:
    """xdist's processes collect side by side, and each would compile all files of a fresh clone, in eight seconds of CPU
    time: each compiles its share first.
    """
    process: dict[str, Any] | None = getattr(session.config, "workerinput", None)
    if process is None or sys.dont_write_bytecode:
        return
    folders = [
        path for path in map(session.config.invocation_params.dir.joinpath, session.config.args) if path.is_dir()
    ]
    files = sorted({file for folder in folders for file in folder.rglob("test_*.py")})
    for file in files[int(process["workerid"].removeprefix("gw")) :: process["workercount"]]:
        _compile(file, session.config)


def _compile(file: Path, config: pytest.Config) -> None:
    """As pytest does when it imports the file."""
    folder = rewrite.get_cache_dir(file)
    compiled = folder / f"{file.stem}{rewrite.PYC_TAIL}"
    if rewrite._read_pyc(file, compiled) is None and rewrite.try_makedirs(folder):
        source, code = rewrite._rewrite_test(file, config)
        rewrite._write_pyc(config.stash[rewrite.assertstate_key], code, source, compiled)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadScopeScheduling:
    """Keep tests that share a fixture in one of xdist's processes."""
    return _ByGroup(config, log)


class _ByGroup(LoadScopeScheduling):
    """A group is a file, or all files that share something costly. (xdist's own ``loadgroup`` has no effect in pytest 9.2.)"""

    def _split_scope(self, nodeid: str) -> str:
        return _group(nodeid.partition("::")[0])


@cache
def _group(path: str) -> str:
    if path.startswith("tests/e2e/") and "simulated: System" in (ROOT / path).read_text(encoding="utf-8"):
        return "simulated"
    return next((group for beginning, group in GROUPS.items() if path.startswith(beginning)), path)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begin with the tests that wait most; those that kill the shared engines come after all others that need them."""
    if "torch" in sys.modules:  # It costs ten seconds in each of xdist's processes.
        raise pytest.UsageError("a test's file imports torch (with vLLM, perhaps) at its top: import it in the test")
    items.sort(key=_rank)
    for item in items:
        if _group(str(item.path.relative_to(ROOT))) in {ENGINES, SYSTEM} and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(ENGINES_S_MAX))


def _rank(item: pytest.Item) -> int:
    if item.path.name == KILLS_ENGINES:
        return 1
    folder = item.path.relative_to(ROOT).parts[1]
    return {"engines": 0, "e2e": 2, "nightly": 2, "integration": 3}.get(folder, 4)


@pytest.fixture(scope="session", autouse=True)
def _parsing_again() -> Iterator[None]:
    """CPython 3.11 may fail to parse while its garbage collector runs (gh-106905). pytest parses the source of a test that
    fails, and would end the whole run.
    """
    parse = ast.parse

    def parse_again(*args: Any, **options: Any) -> ast.AST:
        try:
            return parse(*args, **options)
        except SystemError:
            return parse(*args, **options)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(ast, "parse", parse_again)
        yield


@pytest.fixture(scope="session", autouse=True)
def state_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What a worker has kept in this user's state folder is no concern of a test, nor the other way round."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture
def nats_server(tmp_path: Path) -> Iterator[NatsServer]:
    with NatsServer(tmp_path, has_buckets=True) as server:
        yield server


@pytest.fixture(autouse=True)
def _heard_logs() -> None:
    """vLLM's parsers and its server, and our own command line, silence loggers of their process: every test's here."""
    logging.disable(logging.NOTSET)
    root = logging.getLogger()
    root.setLevel(logging.WARNING)
    for handler in root.handlers:
        handler.setLevel(logging.NOTSET)
