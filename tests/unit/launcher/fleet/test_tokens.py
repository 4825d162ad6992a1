"""Tokens: what is in them, what is wrong with a bad one, and what a host that joins does with it."""

from __future__ import annotations

import os
import re
import socket
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest

from services.launcher.cluster.files import create, create_for, existing_files
from services.launcher.cluster.folder import NKEY, InitRequest
from services.launcher.commands.tokens import part_from_running
from services.launcher.commands.tokens import token as make
from services.launcher.fleet import head, joining
from services.launcher.fleet.fleet_file import HostPart
from services.launcher.fleet.joining import Token, WrongToken, read_token, write_token
from services.launcher.system.options import ModelOptions, UpOptions
from services.launcher.system.plan import plan_system
from services.launcher.system.process_plan import Machine, PlanRefused
from services.launcher.system.state_file import RunningModel, RunningSystem
from shared.bus.nats_credentials import read_seed
from tests.support.nats_server import free_port

PART = HostPart(name="two", models=(ModelOptions(model="A", decode=2),), env={"WORKER_LEGS_MAX": "9"})
URL = "tls://10.0.0.1:4222"


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("head") / "cluster"


@pytest.fixture(scope="module")
def token(keys: Path) -> Token:
    return head.make_token(keys, URL, PART)


def test_a_token_is_one_word_and_reads_back(token: Token):
    text = write_token(token)

    assert re.fullmatch(r"\S+", text)
    assert read_token(text) == token
    assert read_token(f"{text[:70]}\n  {text[70:]}\n") == token


FLEET = """
[[host]]
name = "one"
address = "10.0.0.1"
workers = [{ role = "prefill", model = "A" }]

[[host]]
name = "two"
workers = [{ role = "decode", model = "A" }]
"""


def test_a_token_in_a_file_is_readable_by_its_owner_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "fleet.toml").write_text(FLEET)
    out = tmp_path / "two.token"
    out.write_text("an older one, which all may read")
    out.chmod(0o644)

    make(config=tmp_path / "fleet.toml", name="two", out=out, state_dir=tmp_path / "state")

    assert sorted(read_token(out.read_text()).seeds) == ["two-decode-1"]
    assert out.stat().st_mode & 0o777 == 0o600
    said = capsys.readouterr()
    assert (said.out, "baton join two.token" in said.err) == ("", True)


def test_a_token_has_the_keys_of_its_workers_and_no_others(keys: Path, token: Token):
    others = {read_seed(file).text for file in keys.glob(f"*/{NKEY}") if "two-decode" not in file.parent.name}
    content = msgspec.json.encode(token).decode()

    assert sorted(token.seeds) == ["two-decode-1", "two-decode-2"]
    assert others
    assert not any(seed in content for seed in others)
    assert "PRIVATE KEY" not in content
    assert not any(seed in repr(token) for seed in token.seeds.values())


def test_the_same_token_is_made_again(keys: Path, token: Token):
    assert head.make_token(keys, URL, PART) == token


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (lambda text: text[:-200], "it was cut off or changed"),
        (lambda text: text[:-1], "it was cut off or changed"),
        (lambda text: text.replace("baton1.", "baton2."), "it has version 2, and this Baton reads 1"),
        (lambda text: text[:100] + ("A" if text[100] != "A" else "B") + text[101:], "it was cut off or changed"),
        (lambda text: "sk-123", "it does not begin with baton1."),
        (lambda text: "", "it does not begin with baton1."),
    ],
)
def test_a_bad_token_says_what_is_wrong(token: Token, changed, message: str):
    with pytest.raises(WrongToken, match=re.escape(message)):
        read_token(changed(write_token(token)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"nats_urls": ("nats://10.0.0.1",)}, "no NATS with TLS"),
        ({"seeds": {}}, "no key for two-decode-1"),
        ({"seeds": {"../x": "SU"}}, "other characters"),
        ({"part": msgspec.structs.replace(PART, name="../../etc")}, "other characters"),
        ({"part": msgspec.structs.replace(PART, env={"LD_PRELOAD": "/x"})}, "LD_PRELOAD"),
        ({"part": msgspec.structs.replace(PART, env={"BATON_STATE_DIR": "/"})}, "BATON_STATE_DIR"),
    ],
)
def test_a_token_cannot_name_files_or_variables_of_the_host(token: Token, change: dict[str, object], message: str):
    with pytest.raises(WrongToken, match=message):
        read_token(write_token(msgspec.structs.replace(token, **change)))


def test_a_host_that_joins_stores_its_keys_for_its_owner_only_and_runs_with_them(
    tmp_path: Path, token: Token, monkeypatch: pytest.MonkeyPatch
):
    for name in ("BATON_NATS_NKEY_FILE", "BATON_NATS_CA_FILE", "WORKER_KV_HOST", "WORKER_LEGS_MAX"):
        monkeypatch.setenv(name, "")
    with socket.create_server(("127.0.0.1", 0)) as nats:
        port = nats.getsockname()[1]
        away = f"tls://127.0.0.1:{free_port()}"
        here = msgspec.structs.replace(token, nats_urls=(away, f"tls://127.0.0.1:{port}"))
        joining.store(tmp_path, here)
        options = joining.joined_options(tmp_path, joining.stored_token(tmp_path, "two"), here.part)

    assert all(file.stat().st_mode & 0o077 == 0 for file in (tmp_path / "joined").rglob("*"))
    assert options.nats_url == f"tls://127.0.0.1:{port},{away}"
    assert (os.environ["WORKER_KV_HOST"], os.environ["WORKER_LEGS_MAX"]) == ("127.0.0.1", "9")
    assert os.environ["BATON_NATS_NKEY_FILE"].endswith("joined/two/worker-two-decode-1/nkey")
    plan = plan_system(options, Machine(python="python", nats_server="", cores=(0, 1)))
    assert {process.name: Path(process.env["BATON_NATS_NKEY_FILE"]).parent.name for process in plan.processes} == {
        "two-decode-1": "worker-two-decode-1",
        "two-decode-2": "worker-two-decode-2",
    }


def test_a_host_whose_nats_cannot_be_reached_says_so(tmp_path: Path, token: Token, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("BATON_NATS_NKEY_FILE", "")
    monkeypatch.setenv("BATON_NATS_CA_FILE", "")
    here = msgspec.structs.replace(token, nats_urls=(f"tls://127.0.0.1:{free_port()}",))

    with pytest.raises(PlanRefused, match="NATS does not respond at"):
        joining.joined_options(tmp_path, here, here.part)


def test_more_workers_than_keys_need_a_new_token(tmp_path: Path, token: Token):
    more = msgspec.structs.replace(PART, models=(ModelOptions(model="A", decode=3),))

    with pytest.raises(WrongToken, match="no key for two-decode-3: make a new token"):
        joining.joined_options(tmp_path, token, more)


def test_revoking_a_host_leaves_hosts_of_like_names(tmp_path: Path):
    keys = tmp_path / "cluster"
    create(keys, InitRequest(workers=("two-decode-1", "two-b-decode-1"), api_key=False), datetime.now(UTC))

    assert head.revoke(keys, "two") == ["two-decode-1"]

    conf = (keys / "nats" / "secure.conf").read_text()
    assert "worker.two-b-decode-1" in conf
    assert "worker.two-decode-1" not in conf
    assert head.revoke(keys, "two") == []


@pytest.mark.parametrize(
    ("running", "message"),
    [
        ({"keys_dir": "", "nats_url": "nats://10.0.0.1:4222"}, "open NATS"),
        ({"keys_dir": "/keys", "nats_url": "tls://127.0.0.1:4222"}, "on this machine only"),
    ],
)
def test_a_system_that_no_other_host_can_reach_gives_no_token(running: dict[str, str], message: str):
    with pytest.raises(PlanRefused, match=message):
        head.nats_url_for_others(RunningSystem(pid=1, endpoint="", engine="simulated", **running))


def test_without_a_fleet_file_a_token_is_for_the_running_model():
    running = RunningSystem(
        pid=1, endpoint="", engine="simulated", nats_url=URL, keys_dir="/keys",
        models=[RunningModel(model="A", aliases=("chat",))],
    )  # fmt: skip

    url, part = part_from_running(running, "two", "decode", 2, "")

    assert url == URL
    model = ModelOptions(model="A", aliases=("chat",), decode=2)
    assert part == HostPart(name="two", engine="simulated", models=(model,))


def test_an_address_that_nats_has_no_certificate_for_gets_one(tmp_path: Path):
    now = datetime.now(UTC)
    create(tmp_path, InitRequest(api_key=False), now)
    create_for(tmp_path, "10.0.0.1", InitRequest(api_key=False), now)
    first = (tmp_path / "nats" / "server.pem").read_bytes()
    create_for(tmp_path, "10.0.0.1", InitRequest(api_key=False), now)

    found = existing_files(tmp_path, now)
    assert "10.0.0.1" in found.names
    assert "10.0.0.1" in found.allowed
    assert (tmp_path / "nats" / "server.pem").read_bytes() == first


def test_an_open_nats_does_not_listen_for_other_machines():
    options = UpOptions(models=(ModelOptions(both=1),), nats_host="10.0.0.1", state_dir="/s")

    with pytest.raises(PlanRefused, match="leave out --open"):
        plan_system(options, Machine(python="python", nats_server="nats-server", cores=(0,)))
