"""`baton init`: what a cluster needs is made once, for its owner's eyes only, and told in words."""

from __future__ import annotations

import re
import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from typer.testing import CliRunner

from services.launcher.cli import app
from services.launcher.cluster.certificates import SERVER_DAYS, facts_of, is_signed_by
from services.launcher.cluster.files import make
from services.launcher.cluster.folder import (
    API_KEYS,
    AUTHORITY,
    AUTHORITY_KEY,
    HOSTS,
    NKEY,
    SECURE,
    SERVER,
    SERVER_KEY,
    CannotMake,
    Found,
    Wish,
    folder_of,
    to_make,
)
from shared.bus.nats_credentials import read_seed
from shared.contracts.channels import Party
from shared.runtime.keys import digest_of

NOW = datetime.now(UTC)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def changed(before: dict[str, bytes], after: dict[str, bytes]) -> set[str]:
    return {file for file in before.keys() | after.keys() if before.get(file) != after.get(file)}


def init(folder: Path, *arguments: str) -> str:
    done = CliRunner().invoke(app, ["init", str(folder), *arguments])
    assert done.exit_code == 0, done.output
    return done.output


def test_each_party_gets_a_key_that_names_it_and_that_nats_knows(tmp_path):
    make(tmp_path, Wish(workers=("gpu-1",)), NOW)

    told = (tmp_path / SECURE).read_text()
    for owner in [*Party, "worker.gpu-1"]:
        seed = read_seed(tmp_path / folder_of(owner) / NKEY)
        assert seed.owner == owner
        assert seed.public_key in told
        assert seed.text not in told
    assert is_signed_by((tmp_path / SERVER).read_bytes(), (tmp_path / AUTHORITY).read_bytes())


def test_nobody_else_can_read_what_is_made(tmp_path):
    folder = tmp_path / "keys"
    make(folder, Wish(), NOW)

    assert {stat.S_IMODE(file.stat().st_mode) for file in folder.rglob("*") if file.is_file()} == {0o600}
    assert {stat.S_IMODE(each.stat().st_mode) for each in [folder, *folder.iterdir()]} == {0o700}


def test_a_second_run_changes_nothing(tmp_path):
    make(tmp_path, Wish(workers=("gpu-1",)), NOW)
    before = contents(tmp_path)

    again = make(tmp_path, Wish(), NOW + timedelta(days=3))

    assert contents(tmp_path) == before
    assert "worker.gpu-1" in again.owners
    assert not again.api_key


def test_a_renewal_makes_a_certificate_for_old_and_new_names_and_nothing_else(tmp_path):
    make(tmp_path, Wish(hosts=("old.example.org",)), NOW)
    before = contents(tmp_path)

    made = make(tmp_path, Wish(hosts=("10.0.0.7",), renew=True), NOW + timedelta(days=30))

    assert changed(before, contents(tmp_path)) == {SERVER, SERVER_KEY}
    assert set(made.server.names) == {*HOSTS, "old.example.org", "10.0.0.7"}
    assert made.is_trusted
    assert made.server.ends_at > facts_of(before[SERVER]).ends_at


def test_force_makes_everything_anew(tmp_path):
    make(tmp_path, Wish(workers=("gpu-1",)), NOW)
    before = contents(tmp_path)

    make(tmp_path, Wish(force=True), NOW)

    assert changed(before, contents(tmp_path)) == before.keys()


def test_a_new_worker_gets_a_key_and_the_others_keep_theirs(tmp_path):
    make(tmp_path, Wish(), NOW)
    before = contents(tmp_path)

    make(tmp_path, Wish(workers=("gpu-1",)), NOW)

    assert changed(before, contents(tmp_path)) == {SECURE, "worker-gpu-1/nkey", "worker-gpu-1/ca.pem"}


def test_the_key_of_the_ca_may_lie_elsewhere_until_a_certificate_is_to_be_made(tmp_path):
    make(tmp_path, Wish(), NOW)
    (tmp_path / AUTHORITY_KEY).unlink()
    before = contents(tmp_path)

    make(tmp_path, Wish(workers=("gpu-1",)), NOW)
    with pytest.raises(CannotMake, match=f"{AUTHORITY_KEY} is not there"):
        make(tmp_path, Wish(renew=True), NOW)

    assert not changed(before, contents(tmp_path)) & before.keys() - {SECURE}


@pytest.mark.parametrize("lost", [SERVER, SERVER_KEY])
def test_half_a_certificate_is_made_anew(lost):
    every = frozenset({AUTHORITY, AUTHORITY_KEY, SERVER, SERVER_KEY, API_KEYS})

    making = to_make(Wish(), Found(files=every - {lost}))

    assert (making.authority, making.server, making.api_key) == (False, True, False)


def test_the_command_says_what_it_made_and_shows_the_api_key_once(tmp_path):
    first = init(tmp_path, "--host", "nats.example.org", "--worker", "gpu-1")
    second = init(tmp_path)

    (key,) = re.findall(r"^baton-\S+$", first, re.MULTILINE)
    assert digest_of(key) in (tmp_path / API_KEYS).read_text()
    assert key not in (tmp_path / API_KEYS).read_text() + second
    assert "nats.example.org" in first
    assert re.search(r"made .*the worker gpu-1 alone", first)
    assert re.search(r"kept .*the worker gpu-1 alone", second)
    assert f"BATON_NATS_NKEY_FILE={tmp_path}/router/nkey" in first


@pytest.mark.parametrize(
    ("age_days", "says"), [(SERVER_DAYS - 10, r"ends in \d+ days.*--renew"), (SERVER_DAYS + 1, "has ended.*--renew")]
)
def test_a_certificate_that_ends_soon_or_has_ended_is_told_until_it_is_renewed(tmp_path, age_days, says):
    make(tmp_path, Wish(), NOW - timedelta(days=age_days))

    assert re.search(says, init(tmp_path))
    assert not re.search(says, init(tmp_path, "--renew"))


def test_a_name_that_the_certificate_lacks_is_told(tmp_path):
    init(tmp_path)

    assert "not for nats.example.org" in init(tmp_path, "--host", "nats.example.org")


def test_a_worker_that_cannot_be_addressed_gets_no_key(tmp_path):
    done = CliRunner().invoke(app, ["init", str(tmp_path / "keys"), "--worker", "a.b"])

    assert done.exit_code == 1
    assert not (tmp_path / "keys").exists()


def test_files_that_hold_something_else_are_named(tmp_path):
    make(tmp_path, Wish(), NOW)
    (tmp_path / SERVER).write_text("nonsense")

    done = CliRunner().invoke(app, ["init", str(tmp_path)])

    assert done.exit_code == 1
    assert (tmp_path / SERVER).read_text() == "nonsense"
