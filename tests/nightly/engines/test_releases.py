"""Every supported release of vLLM: its interfaces, our tests with its Python files, and a fleet that moves to it."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import product
from pathlib import Path
from threading import Event

import httpx
import pytest

from tests.nightly.test_upgrade import CONVERSATIONS, MODEL, TOKENS, Clients, Upgrade, ask, nothing_is_lost, served_by
from tests.support.kv_tap import Tap
from tests.support.nats_server import NatsServer
from tests.support.processes import ROOT, ServiceProcess
from tests.support.system import System, until
from tests.support.vllm_releases import RELEASES, fetch_sources, laid_over
from tests.unit.connector.vllm_interfaces import differences, installed_release, interfaces_of, recorded

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(3600)]

HERE = installed_release()
OTHERS = sorted(RELEASES.keys() - {HERE})
START_S_MAX = 480.0
SMALL = {"WORKER_MAX_MODEL_LEN": "4096", "WORKER_KV_FETCH_MIN_TOKENS": "32"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the sources that are fetched."""
    return tmp_path_factory.mktemp("vllm")


@pytest.mark.parametrize("release", sorted(RELEASES))
def test_the_recorded_interfaces_are_those_of_the_release(release: str, folder: Path):
    changed = differences(interfaces_of(fetch_sources(RELEASES[release], folder)), recorded(release))

    assert not changed, "\n".join(changed)


@pytest.mark.parametrize("tests", ["tests/unit/connector tests/unit/worker", "tests/engines"], ids=["quick", "engines"])
@pytest.mark.parametrize("release", OTHERS)
def test_our_tests_pass_with_the_release(release: str, tests: str, folder: Path):
    """With the compiled parts of the installed one."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}

    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rs", "-m", "not gpu", "-n", "2", *tests.split()],
        cwd=ROOT,
        env={**environ, "PYTHONPATH": str(laid_over(RELEASES[release], folder))},
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stdout[-8000:]


@contextmanager
def tapped(url: str) -> Iterator[Tap]:
    """Records the messages of the workers until the block ends."""
    tap, begun, over = Tap(url), Event(), Event()

    async def listen() -> None:
        async with tap:
            begun.set()
            await asyncio.to_thread(over.wait)

    with ThreadPoolExecutor(1) as thread:
        listening = thread.submit(asyncio.run, listen())
        until(begun.is_set, "the tap listens", 30.0)
        try:
            yield tap
        finally:
            over.set()
            listening.result()


@pytest.mark.parametrize("release", OTHERS)
def test_a_fleet_moves_to_the_release_under_traffic(release: str, folder: Path, tmp_path: Path):
    """Real engines. Both releases hold the same conversations; what one of them computed is never read by the other."""
    over = str(laid_over(RELEASES[release], folder))
    with NatsServer(tmp_path, has_buckets=True) as nats, ExitStack() as processes:
        upgrade = Upgrade(processes, tmp_path, nats, ROUTER_FETCH_TOKENS_MIN="32")
        tap = processes.enter_context(tapped(nats.url))

        def start(name: str, role: str, core: str, **settings: str) -> ServiceProcess:
            return upgrade.start(
                "worker", WORKER_WORKER_ID=name, WORKER_ROLE=role, WORKER_CPU_CORES=core, **SMALL, **settings
            )

        def serving(count: int) -> bool:
            return sum(sum(workers.values()) for _share, workers in upgrade.revisions().values()) == count

        old = [start("old-prefill", "prefill", "0"), start("old-decode", "decode", "1")]
        until(lambda: serving(2), "the pair serves", START_S_MAX)
        clients = Clients(upgrade.url)
        with clients.asking():
            clients.until_more()
            start("new-both", "both", "0", PYTHONPATH=over)
            until(lambda: serving(3), "the new release serves", START_S_MAX)
            with httpx.Client(base_url=upgrade.url, timeout=60.0, trust_env=False) as http:
                for question in product(range(CONVERSATIONS), (0, 1)):
                    # The old release has all of it in its cache, and may even be named as the source.
                    sources = {"sources": ["old-decode"]} if question[1] else {}
                    clients.told.append(ask(http, question, baton={"decode_worker": "new-both", **sources}))
            assert [worker.stop() for worker in old] == [0, 0]
            until(lambda: serving(1), "the old release is gone", START_S_MAX)
            alone_at = max(one.ended_at for one in clients.told)
            clients.until_more()
            end_at = max(one.ended_at for one in clients.told)

    nothing_is_lost(clients.told)
    assert served_by(clients.told) == {"old", "new"}
    assert served_by(clients.between(alone_at, end_at)) == {"new"}
    reads = [
        (leg.start.worker_id, read.worker_id)
        for leg in tap.legs.values()
        if leg.report is not None and leg.report.kv is not None
        for read in leg.report.kv.reads
    ]
    assert ("old-decode", "old-prefill") in reads
    assert all(reader.partition("-")[0] == holder.partition("-")[0] for reader, holder in reads)


@pytest.mark.parametrize("release", sorted(RELEASES))
def test_requests_that_come_during_a_pause_are_served_after_it(release: str, folder: Path, tmp_path: Path):
    paths = [str(ROOT)] if release == HERE else [str(ROOT), str(laid_over(RELEASES[release], folder))]
    body = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": TOKENS}
    with (
        System(tmp_path, "--both", "1", "--open", env={"PYTHONPATH": os.pathsep.join(paths)}) as system,
        ThreadPoolExecutor(1) as thread,
    ):
        system.wait_ready(START_S_MAX)
        (worker,) = system.fleet().values()
        assert worker["record"]["fingerprint"]["engine_version"].startswith(f"vllm-{release}.")
        for mode in ("wait", "abort"):
            paused = system.http.post("/pause", params={"mode": mode, "clear_cache": "false"})
            assert paused.json() == {"status": "paused"}
            asked = thread.submit(system.http.post, "/v1/completions", json=body)
            until(lambda: system.fleet_metrics().sum("baton_worker_legs") == 1, "the worker has the request", 60.0)
            assert system.http.post("/resume").json() == {"status": "resumed"}
            assert asked.result(60.0).status_code == 200
        retries = system.metrics().sum("baton_router_retries_total")
        assert not retries, "the engine has refused a request, and the router has tried again"
