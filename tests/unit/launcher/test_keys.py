"""`baton keys new --file`: the file is replaced whole, and never by something that routers cannot read."""

from __future__ import annotations

import os
import stat
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from typer.testing import CliRunner

from services.launcher.cli import app
from services.launcher.cluster.api_keys import add_entry
from services.router.auth.api_keys import read_keys
from shared.contracts.api_keys import Key, digest_of


def new(file: Path, *options: str, tenant: str = "acme") -> tuple[int, str]:
    done = CliRunner().invoke(app, ["keys", "new", "--tenant", tenant, "--file", str(file), *options])
    return done.exit_code, done.output


def keys_in(file: Path):
    return read_keys(tomllib.loads(file.read_text())).keys


def test_a_note_with_an_emoji_leaves_the_file_readable(tmp_path: Path):
    file = tmp_path / "keys.toml"

    assert new(file, "--note", "on call 😀")[0] == 0
    assert new(file, "--note", "plain")[0] == 0

    assert [key.note for key in keys_in(file).values()] == ["on call 😀", "plain"]


def test_a_new_file_is_its_owners_and_a_replaced_one_keeps_mode_comments_and_link(tmp_path: Path):
    (tmp_path / "real").mkdir()
    file, link = tmp_path / "real" / "keys.toml", tmp_path / "keys.toml"
    link.symlink_to(file)
    new(link)
    assert file.stat().st_mode & 0o777 == 0o600

    file.write_text(f"# mine\n{file.read_text()}")
    file.chmod(0o640)
    inode = file.stat().st_ino
    new(link, tenant="rival")

    assert link.is_symlink()
    assert file.read_text().startswith("# mine\n")
    assert (file.stat().st_mode & 0o777, file.stat().st_ino != inode) == (0o640, True)
    assert [key.tenant for key in keys_in(file).values()] == ["acme", "rival"]


@pytest.mark.parametrize(
    ("content", "says"),
    [(b"[[key]]\nhalf of a f", "not valid TOML"), (b"\xff\xfe", "not UTF-8"), (b"key = []\n", "as [[key]] tables")],
)
def test_a_file_that_cannot_take_a_key_is_left_as_it_is_and_no_key_is_shown(tmp_path: Path, content: bytes, says: str):
    file = tmp_path / "keys.toml"
    file.write_bytes(content)

    code, printed = new(file)

    assert (code, says in printed.replace("\n", " ")) == (1, True)
    assert "baton-" not in printed
    assert file.read_bytes() == content


def test_commands_at_the_same_time_lose_no_key(tmp_path: Path):
    file = tmp_path / "keys.toml"
    entries = [Key(tenant=f"t{number}", sha256=digest_of(str(number))) for number in range(8)]

    with ThreadPoolExecutor(len(entries)) as pool:
        list(pool.map(lambda entry: add_entry(file, entry), entries))

    assert {key.tenant for key in keys_in(file).values()} == {entry.tenant for entry in entries}


def test_a_name_and_a_budget_are_written_and_no_name_twice(tmp_path: Path):
    file = tmp_path / "keys.toml"
    assert new(file, "--name", "ci", "--monthly-tokens", "500")[0] == 0

    code, said = new(file, "--name", "ci")[:2]

    assert code == 1
    assert "another key in it has the name ci" in " ".join(said.split())
    assert [(key.label, key.monthly_tokens) for key in keys_in(file).values()] == [("ci", 500)]


def test_a_device_or_pipe_is_refused_and_stays_what_it_is(tmp_path: Path):
    """Root would replace /dev/null for the whole machine."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)

    code, printed = new(pipe)

    assert (code, "no regular file" in printed) == (1, True)
    assert "baton-" not in printed
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_a_key_for_all_models_does_not_read_as_one_for_none(tmp_path: Path):
    file = tmp_path / "keys.toml"

    assert new(file)[0] == 0

    assert "models" not in file.read_text()
