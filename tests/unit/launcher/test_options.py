"""Options that several commands share, and the error for a NATS that does not respond."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from services.launcher.cli import app
from services.launcher.commands.options import no_nats
from services.launcher.fleet.joining import TOKEN, joined_folder
from services.launcher.system.options import parse_bytes
from shared.bus.port import BusDown
from tests.support.nats_server import free_port

URL = "nats://router:secret@127.0.0.1:9"


@pytest.mark.parametrize(
    ("why", "text"),
    [
        (
            "no NATS at nats://127.0.0.1:9 within 5 s: refused",
            "NATS at nats://127.0.0.1:9 does not respond. Start a system with `baton up`",
        ),
        (
            "NATS at nats://127.0.0.1:9 asks who this is: name the key.",
            "asks who this is: name the key. Run `baton doctor`",
        ),
    ],
)
def test_errors_distinguish_missing_nats_from_refusal_and_hide_the_password(
    why: str, text: str, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit) as ended:
        no_nats(URL, BusDown(why), None)

    printed = capsys.readouterr().err
    assert ended.value.code == 1
    assert text in printed
    assert "secret" not in printed


@pytest.fixture
def joined(tmp_path: Path) -> Path:
    """The state directory of a host that has joined; no variable names it."""
    token = joined_folder(tmp_path, "two") / TOKEN
    token.parent.mkdir(parents=True)
    token.touch()
    return tmp_path


@pytest.mark.parametrize("command", ["workers", "drain w-1", "lora load sql sql-v2", "sleep m", "report", "usage"])
def test_a_host_that_has_joined_sends_its_operator_to_the_head_host(command: str, joined: Path):
    nats = f"nats://127.0.0.1:{free_port()}"

    done = CliRunner().invoke(app, [*command.split(), "--nats-url", nats, "--state-dir", str(joined)])

    assert done.exit_code == 1
    assert "joined as two: its workers belong to a system on another host. Run the command on the head" in done.output
    assert "baton up" not in done.output


@pytest.mark.parametrize("command", ["explain", "batch list"])
def test_a_host_that_has_joined_is_told_to_name_a_router(command: str, joined: Path):
    done = CliRunner().invoke(app, [*command.split(), "--state-dir", str(joined)])

    assert done.exit_code == 1
    assert "joined as two: its workers belong to a system on another host. Name a router: --url" in done.output


@pytest.mark.parametrize(
    ("text", "expected"), [("1024", 1024), ("512M", 512 * 2**20), ("2GiB", 2**31), ("1.5 g", 3 * 2**29), ("4kb", 4096)]
)
def test_sizes_are_powers_of_1024(text: str, expected: int):
    assert parse_bytes(text) == expected


def test_an_invalid_size_is_rejected_with_an_example():
    with pytest.raises(ValueError, match="512M"):
        parse_bytes("much")
