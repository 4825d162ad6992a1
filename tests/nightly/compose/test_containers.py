"""The containers serve requests, and go on when one of them is lost."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import httpx
import pytest

from services.launcher.cluster.api_keys import add_entry
from shared.contracts.api_keys import Key, digest_of
from tests.nightly.compose.conftest import POLL_S, Compose, wait_until_ready

pytestmark = pytest.mark.compose

REQUEST = {"model": "baton-tiny", "prompt": "Once upon a time there was a relay race", "max_tokens": 12}
REQUEST_S_MAX = 60.0


def complete(system: Compose, key: str = "", **more: object) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    body = {**REQUEST, **more}
    return httpx.post(f"{system.endpoint}/v1/completions", json=body, headers=headers, timeout=REQUEST_S_MAX)


def test_a_request_is_answered_by_two_workers(system: Compose):
    answer = complete(system, temperature=0, prompt="Which two runners share one baton? " * 20)

    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 12
    assert answer.headers["x-baton-mode"] == "disaggregated"
    assert answer.headers["x-baton-prefill-worker"].startswith("prefill-")
    assert answer.headers["x-baton-decode-worker"].startswith("decode-")


def test_streamed_and_whole_responses_have_the_same_text(system: Compose):
    whole = complete(system, temperature=0).json()["choices"][0]["text"]

    streamed = complete(system, temperature=0, stream=True)

    events = [line.removeprefix("data: ") for line in streamed.text.splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    assert "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1]) == whole


def test_the_metrics_of_the_fleet_are_served(system: Compose):
    assert "baton_" in httpx.get(system.metrics, timeout=REQUEST_S_MAX).text


def test_the_light_image_holds_neither_torch_nor_vllm(system: Compose):
    looked = "import importlib.util as u; print([n for n in ('torch', 'vllm') if u.find_spec(n)])"

    assert system.run("exec", "-T", "router", "python", "-c", looked).strip() == "[]"


def test_the_router_has_its_index_and_placement_in_c(system: Compose):
    """An image without compiler or headers would be built without them."""
    import_both = "from baton_serve.services.router.native import _block_table, _placement"
    system.run("exec", "-T", "router", "python", "-c", import_both)


def test_no_container_of_ours_runs_as_root(system: Compose):
    for service in ("router", "orchestrator", "collector", "sim-prefill"):
        assert system.run("exec", "-T", service, "id", "-u").strip() == "10001", service


def test_processes_can_write_to_their_caches_and_state_and_to_nothing_else(system: Compose):
    for service in ("router", "orchestrator", "collector", "sim-prefill", "sim-decode"):
        folders = "/tmp /home/baton/.cache"
        folders += " /home/baton/.local/state" if service.startswith("sim-") else ""
        system.run("exec", "-T", service, "sh", "-c", f'for each in {folders}; do touch "$each/written" || exit; done')
        assert system.attempt("exec", "-T", service, "touch", "/home/baton/written").returncode != 0, service


SPEAK = """
# Sends a load report for each of these workers, and prints those for which NATS refused it.
import asyncio, re, ssl, sys, nats
from shared.bus.nats_credentials import read_seed

async def main():
    refused = []
    async def note(error): refused.extend(re.findall(r"worker[.](.+)[.]load", str(error)))
    trust = ssl.create_default_context(cafile="/tmp/key/ca.pem")
    seed = read_seed("/tmp/key/nkey").text
    bus = await nats.connect("tls://nats:4222", tls=trust, nkeys_seed_str=seed, error_cb=note)
    for worker in sys.argv[1:]:
        await bus.publish(f"worker.{worker}.load", b"")
    for _time in range(100):  # NATS may send an error after the pong.
        await bus.flush()
        if len(refused) == len(sys.argv) - 2: break
    print(*refused)
    await bus.close()
asyncio.run(main())
"""


def test_each_worker_has_a_key_of_its_own_and_speaks_for_itself_only(system: Compose):
    containers = [each for name in ("sim-prefill", "sim-decode") for each in system.run("ps", "-q", name).split()]
    by_id = {worker_of(system, container): container for container in containers}

    assert sorted(by_id) == ["decode-1", "decode-2", "prefill-1"]
    for worker, container in by_id.items():
        said = system.docker("exec", container, "python", "-c", SPEAK, *by_id)
        assert sorted(said.split()) == sorted({*by_id} - {worker})
        role = worker.partition("-")[0]
        assert all(key.startswith(f"{role}-") for key in system.docker("exec", container, "ls", "/keys/own").split())


def worker_of(system: Compose, container: str) -> str:
    """The id of the worker in a container."""
    return system.docker("exec", container, "readlink", "/tmp/key").strip().rpartition("/")[2]


def test_no_container_ends_and_is_started_again(system: Compose):
    restarts = system.docker("inspect", "--format", "{{.RestartCount}}", *system.containers()).split()

    assert set(restarts) == {"0"}


def test_the_log_of_each_container_is_bounded(system: Compose):
    form = '{{index .HostConfig.LogConfig.Config "max-size"}} {{index .HostConfig.LogConfig.Config "max-file"}}'

    assert set(system.docker("inspect", "--format", form, *system.containers()).splitlines()) == {"16m 4"}


def test_a_second_up_with_a_build_recreates_no_container(system: Compose):
    before = system.containers()

    system.up("--build")

    assert system.containers() == before


def test_a_drained_worker_stays_away_until_its_container_is_restarted(system: Compose):
    container = system.run("ps", "--quiet", "sim-decode").split()[0]
    worker = worker_of(system, container)

    system.run("run", "--rm", "-T", "baton", "drain", worker)

    processes = ""
    deadline = time.monotonic() + REQUEST_S_MAX
    while "sleep infinity" not in processes and time.monotonic() < deadline:
        processes = system.docker("top", container)
        time.sleep(POLL_S)
    assert "sleep infinity" in processes
    assert complete(system).headers.get("x-baton-decode-worker") != worker
    began = time.monotonic()
    system.docker("restart", container)
    assert time.monotonic() - began < REQUEST_S_MAX, "the process that waits does not heed SIGTERM"
    while f"{worker}  decode  ready" not in system.run("run", "--rm", "-T", "baton", "workers"):
        assert time.monotonic() < began + 2 * REQUEST_S_MAX, "the worker did not come back"


def test_keys_that_the_baton_service_writes_are_seen_without_a_restart(system: Compose):
    command = ("run", "--rm", "-T", "baton", "keys", "new", "--file", "/keys/api/keys.toml", "--tenant")
    first = system.run(*command, "first").strip()
    try:
        system.up(API_KEYS="true")
        assert complete(system).status_code == 401
        assert complete(system, key=first).status_code == 200

        second = system.run(*command, "second").strip()

        deadline = time.monotonic() + REQUEST_S_MAX
        while complete(system, key=second).status_code == 401 and time.monotonic() < deadline:
            time.sleep(POLL_S)
        assert complete(system, key=second).status_code == 200
    finally:
        system.up()


def test_a_key_file_of_another_user_is_refused_with_its_remedy(system: Compose, tmp_path: Path):
    file = tmp_path / "keys.toml"
    add_entry(file, Key(tenant="first", sha256=digest_of("key")))
    mode = file.stat().st_mode & 0o777
    router = ("run", "--rm", "-T", "--no-deps", "router")

    refused = system.attempt(*router, KEYS_FILE=str(file))

    assert (mode, refused.returncode) == (0o600, 78)
    assert "compose: KEYS_FILE" in refused.stdout + refused.stderr
    assert "chown 10001 FILE" in refused.stdout + refused.stderr
    if os.getuid() == 0:
        os.chown(file, 10001, -1)
        assert "first" in system.run(*router, "cat", "/etc/baton/keys.toml", KEYS_FILE=str(file))


def test_a_wrong_path_of_a_key_file_makes_no_folder(system: Compose, tmp_path: Path):
    file = tmp_path / "kyes.toml"

    refused = system.attempt("run", "--rm", "-T", "--no-deps", "router", KEYS_FILE=str(file))

    assert refused.returncode != 0
    assert not file.exists()


def test_requests_are_answered_after_a_worker_container_was_killed(system: Compose):
    victim = system.run("ps", "--quiet", "sim-decode").split()[0]

    system.docker("kill", victim)

    answers = [complete(system, temperature=0) for _ in range(10)]
    assert [answer.status_code for answer in answers] == [200] * 10
    system.up()


def test_requests_are_answered_again_after_nats_was_restarted(system: Compose):
    system.run("restart", "nats")

    wait_until_ready(system)
    deadline = time.monotonic() + REQUEST_S_MAX
    while (answer := complete(system, temperature=0)).status_code == 503 and time.monotonic() < deadline:
        time.sleep(POLL_S)
    assert answer.status_code == 200, answer.text
