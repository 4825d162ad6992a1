"""`baton` as a user has it: refused starts, a second terminal, the fleet's table, and no process left behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import httpx
import nats
import psutil
import pytest

from replay.capacity.speeds import read_speeds
from services.launcher.cluster.folder import variables
from shared.bus.nats_credentials import new_seed
from shared.contracts.channels import Party
from shared.runtime.service import EXIT_CONFIGURATION
from tests.e2e.conftest import START_S_MAX
from tests.support.nats_server import free_port, is_free
from tests.support.system import GUARD_S_MAX, STOP_S_MAX, Launched, System, baton, until

pytestmark = pytest.mark.nats

SIMULATED = ("--engine", "simulated")


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    with System(tmp_path_factory.mktemp("launcher"), *SIMULATED, "--prefill", "1", "--decode", "1") as system:
        yield system.wait_ready(START_S_MAX)


def test_up_prints_endpoint_curl_line_console_and_log_folder(system: System):
    said = system.said()

    assert f"{system.endpoint}/v1" in said
    assert "curl -N" in said
    assert f"http://127.0.0.1:{system.collector_port}/console" in said
    assert str(system.logs) in said
    assert {log.stem for log in system.logs.glob("*.log")} == {
        "nats", "orchestrator", "collector", "router", "prefill-1", "decode-1"
    }  # fmt: skip


async def test_another_user_of_this_machine_can_neither_connect_to_nats_nor_read_the_keys(system: System):
    """Without any option. What a file's owner may do, its modes show: tests may run as root."""
    trusting = ssl.create_default_context()
    trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
    for url, options in (
        (f"nats://127.0.0.1:{system.nats_port}", {}),
        (system.nats_url, {"tls": trusting}),
        (system.nats_url, {"tls": trusting, "nkeys_seed_str": new_seed("launcher").text}),
    ):
        with pytest.raises(Exception, match=r"(?i)authorization violation|certificate verify failed|self.signed"):
            await nats.connect(url, connect_timeout=5, allow_reconnect=False, max_reconnect_attempts=0, **options)

    keys = system.folder / "cluster"
    for each in (system.folder, keys, *keys.rglob("*")):
        assert each.stat().st_mode & 0o077 == 0, each
    seeds = {file.parent.name for file in keys.rglob("nkey")}
    assert seeds == set(Party)
    assert all(
        process.environ().get("BATON_NATS_NKEY_FILE", str(keys)).startswith(str(keys)) for process in system.processes()
    )


def test_every_command_finds_the_keys_of_the_running_system(system: System):
    served_by(system)
    for command in (
        ("workers",),
        ("plan",),
        ("report",),
        ("health", "router"),
        ("explain", "--nats-url", system.nats_url),
        ("doctor", "--quick"),
    ):
        run = partial(baton, *command, "--state-dir", str(system.folder))
        until(lambda run=run: run()[0] == 0, f"baton {' '.join(command)} works")


@pytest.mark.skipif(not socket.has_ipv6, reason="this machine has no IPv6")
def test_a_system_on_ipv6_serves_and_ends(tmp_path: Path):
    ports = [str(free_port()) for _ in range(3)]
    options = ("--port", ports[0], "--collector-port", ports[1], "--nats-port", ports[2])
    hosts = ("--host", "::1", "--collector-host", "::1", "--nats-host", "::1")
    launched = Launched(tmp_path, "--engine", "simulated", *hosts, *options, env={"WORKER_KV_HOST": "::1"})
    with launched:
        launched.wait_said(f"http://[::1]:{ports[0]}/v1", 120.0)
        body = {"model": "baton-tiny", "prompt": "Is anybody there? " * 30, "max_tokens": 4}
        reply = httpx.post(f"http://[::1]:{ports[0]}/v1/completions", json=body, timeout=60.0)
        launched.end()

    assert reply.status_code == 200


def test_a_second_start_on_the_same_ports_names_them_and_starts_nothing(system: System, tmp_path: Path):
    ports = (
        "--port",
        str(system.port),
        "--collector-port",
        str(system.collector_port),
        "--nats-port",
        str(system.nats_port),
    )

    code, out, err = baton("up", *SIMULATED, *ports, "--state-dir", str(tmp_path))

    assert code == 1
    for port, option in (
        (system.port, "--port"),
        (system.collector_port, "--collector-port"),
        (system.nats_port, "--nats-port"),
    ):
        assert f"Port {port}" in out + err
        assert option in out + err
    assert not list((tmp_path / "logs").glob("*.log"))


def test_a_port_that_a_stranger_holds_is_named_with_its_holder(tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        port = stranger.getsockname()[1]
        code, out, err = baton("up", *SIMULATED, "--port", str(port), "--state-dir", str(tmp_path))

    assert code == 1
    assert f"Port {port}" in out + err
    assert f"pid {os.getpid()}" in out + err


def test_a_second_start_with_the_same_state_directory_is_refused(system: System):
    code, out, err = baton("up", *SIMULATED, "--state-dir", str(system.folder))

    assert code == 1
    assert "already runs" in out + err
    assert system.http.get("/ready").status_code == 200


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--prefill", "1"), "--decode 1"),
        (("--prefill", "0", "--decode", "0"), "No workers"),
        (("--nats-url", "nats://127.0.0.1:9"), "127.0.0.1:9"),
        (("--join",), "No system runs"),
        (("--gpus-per-worker", "2"), "Simulated engines have no ranks"),
        (("--model", "a", "--model", "a"), "--model a is given twice"),
    ],
)
def test_impossible_options_give_a_clear_error(tmp_path: Path, arguments: tuple[str, ...], text: str):
    ports = ("--port", str(free_port()), "--collector-port", str(free_port()))
    code, out, err = baton("up", *SIMULATED, "--state-dir", str(tmp_path), *ports, *arguments)

    assert code == 1
    assert text in out + err
    assert "Traceback" not in out + err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--state-dir", "FILE/state"), "FILE/state: Not a directory"),
        (("--port", "99999"), "less than or equal to 65535"),
    ],
)
def test_what_this_machine_cannot_do_is_said_without_a_traceback(tmp_path: Path, arguments: tuple[str, ...], text: str):
    file = tmp_path / "file"
    file.touch()
    given = [each.replace("FILE", str(file)) for each in arguments]
    code, out, err = baton("up", *SIMULATED, *given)

    assert code != 0
    assert text.replace("FILE", str(file)) in out + err
    assert "Traceback" not in out + err


def test_a_misspelled_setting_stops_the_start_and_is_named(tmp_path: Path):
    with System(tmp_path, *SIMULATED, "--both", "1", env={"ROUTER_BODY_BYTE_MAX": "1"}) as wrong:
        assert wrong.process is not None
        assert wrong.process.wait(STOP_S_MAX) == EXIT_CONFIGURATION

    assert "ROUTER_BODY_BYTES_MAX" in wrong.said()


def test_a_joined_worker_takes_traffic_and_leaves_without_a_trace(system: System):
    second_terminal = Launched(system.folder, "--join", "--decode", "1", env={"WORKER_CACHE_HIT_THRESHOLD": "0.8"})
    with second_terminal:
        second_terminal.wait_said("joined tls", START_S_MAX)
        assert set(system.fleet()) >= {"prefill-1", "decode-1", "decode-2"}
        until(lambda: served_by(system, "decode-2") == "decode-2", "the new worker serves")
        assert [ended(system, worker) for worker in ("decode-1", "decode-2")] == ["length", "length"]
        code, out, err = baton("explain", refused_before(system), "--state-dir", str(system.folder))
        assert code == 0, err
        assert "80% must be cached or fetched (the worker's default); 0.0% was: refused" in " ".join(out.split())
        second_terminal.end()

    assert served_by(system) == "decode-1"
    until(lambda: "decode-2" not in ready(system), "it is not ready any more")


def served_by(system: System, asked: str = "") -> str:
    """Who answered. Of two that are equal, routers may find the same one better again and again: so one may be asked."""
    body = {"model": "baton-tiny", "prompt": "Who runs?", "max_tokens": 2}
    body |= {"baton": {"decode_worker": asked}} if asked else {}
    answer = system.http.post("/v1/completions", json=body)
    if asked and answer.status_code != 200:  # the router has not heard of it yet
        return ""
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["finish_reason"] == "length"
    return answer.headers["x-baton-decode-worker"]


def refused_before(system: System) -> str:
    """The decision of the attempt before the newest one."""
    return str(system.http.get("/baton/decisions", params={"limit": 1}).json()["decisions"][0]["earlier"])


def ended(system: System, worker: str) -> str:
    """Why the answer of this worker to a prompt of which nothing is cached has ended."""
    body = {"model": "baton-tiny", "prompt": f"Who has never run for {worker}? " * 20, "max_tokens": 2}
    body |= {"baton": {"decode_worker": worker}}
    answer = system.http.post("/v1/completions", json=body, headers={"x-baton-mode": "aggregated"})
    return str(answer.json()["choices"][0]["finish_reason"])


def ready(system: System) -> set[str]:
    return {name for name, worker in system.fleet().items() if worker["phase"] == "ready"}


def test_the_fleet_is_listed_for_people(system: System):
    code, out, _err = baton("workers", "--state-dir", str(system.folder))

    rows = {line.split()[0]: line for line in out.splitlines() if line}
    assert code == 0
    assert "prefill" in rows["prefill-1"]
    assert "ready" in rows["decode-1"]
    assert str(system.worker_pid("decode-1")) in out


def test_the_fleet_is_listed_for_programs(system: System):
    code, out, err = baton("workers", "--json", "--state-dir", str(system.folder))

    listed = {worker["record"]["worker_id"]: worker for worker in json.loads(out)["workers"]}
    assert (code, err) == (0, "")
    assert listed["prefill-1"]["record"] == system.fleet()["prefill-1"]["record"]
    assert {worker["phase"] for worker in listed.values()} >= {"ready"}


def test_baton_health_works_with_the_services_own_key(system: System):
    def health(party: str, *of: str) -> int:
        """As in a container, which has one party's key and no other."""
        own = {"BATON_STATE_DIR": str(system.folder / "none"), **variables(str(system.folder / "cluster"), party)}
        return baton("health", party, *of, "--nats-url", system.nats_url, env=own)[0]

    well = [health(service) for service in ("router", "orchestrator", "collector")]
    nobody = health("worker", "nobody", "--within-s", "0.5")

    assert well == [0, 0, 0]
    assert nobody == 1


def test_open_is_the_way_without_keys_and_ctrl_c_while_it_starts_leaves_nothing(tmp_path: Path):
    with System(tmp_path, *SIMULATED, "--open", "--both", "1") as system:
        system.wait_said("NATS is open", START_S_MAX)
        until(lambda: f"nats://127.0.0.1:{system.nats_port}" in system.said(), "NATS listens without TLS")

        system.end(signal.SIGINT)

        assert all(is_free(port) for port in (system.port, system.collector_port, system.nats_port))
    assert not (tmp_path / "cluster").exists()


def test_a_killed_launcher_leaves_no_process_behind(tmp_path: Path):
    with System(tmp_path, *SIMULATED, "--both", "1") as system:
        system.wait_ready(START_S_MAX)
        others = [process for process in system.processes() if process.pid != system.process.pid]
        assert len(others) >= 5

        system.process.kill()

        _gone, left = psutil.wait_procs(others, GUARD_S_MAX)
        assert left == []
        assert all(is_free(port) for port in (system.port, system.collector_port, system.nats_port))


def test_no_process_was_refused_anything_on_nats(system: System):
    assert served_by(system)

    logs = {log.stem: log.read_text() for log in system.logs.glob("*.log")}
    assert {"router", "orchestrator", "collector", "prefill-1", "decode-1"} <= logs.keys()
    assert [name for name, text in logs.items() if "violation" in text.lower()] == []


def test_without_a_key_the_error_names_the_key_and_nothing_else(system: System, tmp_path: Path):
    code, out, err = baton(
        "workers", "--nats-url", f"tls://127.0.0.1:{system.nats_port}", "--state-dir", str(tmp_path),
        env={"BATON_NATS_CA_FILE": str(system.folder / "cluster" / "router" / "ca.pem")},
    )  # fmt: skip

    assert code == 1
    assert "BATON_NATS_NKEY_FILE" in out + err
    assert "prefill-1" not in out + err


def test_the_speeds_of_the_running_engines_are_exported_to_plan_with(system: System, tmp_path: Path):
    """By the function and not by its entry point, which an older installation does not have."""
    exported = tmp_path / "speeds.json"
    code = "from replay.cli import app; app()"
    command = [sys.executable, "-c", code, "--export-speeds", str(exported), "--state-dir", str(system.folder)]

    def export() -> bool:
        served_by(system)  # Engines have measured nothing before their first requests.
        return subprocess.run(command, capture_output=True, timeout=STOP_S_MAX, check=False).returncode == 0

    until(export, "both workers have measured their engines")

    speeds = read_speeds(exported)
    assert speeds.model == "baton-tiny"
    assert speeds.gpus == 1
    assert 0 < speeds.prefill_token_s < 1
    assert 0 < speeds.decode_step_s + speeds.decode_request_s < 1
    assert speeds.kv_tokens > 1000


def test_ctrl_c_under_load_lets_what_runs_finish_and_leaves_nothing(system: System):
    """The last of them: it uses the system up."""
    body = {"model": "baton-tiny", "prompt": "Run!", "max_tokens": 300, "ignore_eos": True, "stream": True}
    with system.http.stream("POST", "/v1/completions", json=body) as answer:
        lines = answer.iter_lines()
        next(lines)

        system.process.send_signal(signal.SIGINT)

        assert [line for line in lines if line][-1] == "data: [DONE]"
    assert system.process.wait(STOP_S_MAX) == 0
    assert not system.processes()
