"""`baton init`: a cluster's files are made once, readable by their owner only, and listed."""

from __future__ import annotations

import re
import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from typer.testing import CliRunner

from services.launcher.cli import app
from services.launcher.cluster.certificates import SERVER_DAYS, facts_of, is_signed_by
from services.launcher.cluster.files import create
from services.launcher.cluster.folder import (
    API_KEYS,
    AUTHORITY,
    AUTHORITY_KEY,
    HOSTS,
    NKEY,
    SECURE,
    SERVER,
    SERVER_KEY,
    TRUSTED,
    CannotCreate,
    ExistingFiles,
    InitRequest,
    folder_of,
    plan_files,
)
from shared.bus.nats_credentials import read_seed
from shared.contracts.api_keys import digest_of
from shared.contracts.channels import Party

NOW = datetime.now(UTC)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def changed(before: dict[str, bytes], after: dict[str, bytes]) -> set[str]:
    return {file for file in before.keys() | after.keys() if before.get(file) != after.get(file)}


def init(folder: Path, *arguments: str) -> str:
    done = CliRunner().invoke(app, ["init", str(folder), *arguments])
    assert done.exit_code == 0, done.output
    return done.output


def test_each_party_gets_a_key_that_nats_accepts(tmp_path):
    create(tmp_path, InitRequest(workers=("gpu-1",)), NOW)

    told = (tmp_path / SECURE).read_text()
    for owner in [*Party, "worker.gpu-1"]:
        seed = read_seed(tmp_path / folder_of(owner) / NKEY)
        assert seed.owner == owner
        assert seed.public_key in told
        assert seed.text not in told
    assert is_signed_by((tmp_path / SERVER).read_bytes(), (tmp_path / AUTHORITY).read_bytes())


def test_created_files_are_readable_by_their_owner_only(tmp_path):
    folder = tmp_path / "keys"
    create(folder, InitRequest(), NOW)

    assert {stat.S_IMODE(file.stat().st_mode) for file in folder.rglob("*") if file.is_file()} == {0o600}
    assert {stat.S_IMODE(each.stat().st_mode) for each in [folder, *folder.iterdir()]} == {0o700}


def test_a_state_folder_that_init_makes_is_its_owners_only(tmp_path):
    create(tmp_path / "state" / "keys", InitRequest(), NOW)

    assert stat.S_IMODE((tmp_path / "state").stat().st_mode) == 0o700


def test_a_second_run_changes_nothing(tmp_path):
    create(tmp_path, InitRequest(workers=("gpu-1",)), NOW)
    before = contents(tmp_path)

    again = create(tmp_path, InitRequest(), NOW + timedelta(days=3))

    assert contents(tmp_path) == before
    assert "worker.gpu-1" in again.owners
    assert not again.api_key


def test_a_renewal_only_replaces_the_certificate_with_old_and_new_names(tmp_path):
    create(tmp_path, InitRequest(hosts=("old.example.org",)), NOW)
    before = contents(tmp_path)

    made = create(tmp_path, InitRequest(hosts=("10.0.0.7",), renew=True), NOW + timedelta(days=30))

    trusted = {f"{folder_of(party)}/{TRUSTED}" for party in Party}
    assert changed(before, contents(tmp_path)) == {SERVER, SERVER_KEY, AUTHORITY, *trusted}
    assert is_signed_by(before[SERVER], (tmp_path / AUTHORITY).read_bytes())
    assert set(made.server.names) == {*HOSTS, "old.example.org", "10.0.0.7"}
    assert made.is_trusted
    assert made.server.ends_at > facts_of(before[SERVER]).ends_at


def test_force_replaces_everything(tmp_path):
    create(tmp_path, InitRequest(workers=("gpu-1",)), NOW)
    before = contents(tmp_path)

    create(tmp_path, InitRequest(force=True), NOW)

    assert changed(before, contents(tmp_path)) == before.keys()


def test_a_new_worker_gets_a_key_and_others_keep_theirs(tmp_path):
    create(tmp_path, InitRequest(), NOW)
    before = contents(tmp_path)

    create(tmp_path, InitRequest(workers=("gpu-1",)), NOW)

    assert changed(before, contents(tmp_path)) == {SECURE, "worker-gpu-1/nkey", "worker-gpu-1/ca.pem"}


def test_the_ca_key_is_needed_only_to_sign_certificates(tmp_path):
    create(tmp_path, InitRequest(), NOW)
    (tmp_path / AUTHORITY_KEY).unlink()
    before = contents(tmp_path)

    create(tmp_path, InitRequest(workers=("gpu-1",)), NOW)
    with pytest.raises(CannotCreate, match=f"{AUTHORITY_KEY} is missing"):
        create(tmp_path, InitRequest(renew=True), NOW)

    assert not changed(before, contents(tmp_path)) & before.keys() - {SECURE}


@pytest.mark.parametrize("lost", [SERVER, SERVER_KEY])
def test_an_incomplete_certificate_is_replaced(lost):
    every = frozenset({AUTHORITY, AUTHORITY_KEY, SERVER, SERVER_KEY, API_KEYS})

    plan = plan_files(InitRequest(), ExistingFiles(files=every - {lost}))

    assert (plan.authority, plan.server, plan.api_key) == (False, True, False)


def test_the_command_lists_its_files_and_shows_the_api_key_once(tmp_path):
    first = init(tmp_path, "--host", "nats.example.org", "--worker", "gpu-1")
    second = init(tmp_path)

    (key,) = re.findall(r"^baton-\S+$", first, re.MULTILINE)
    assert digest_of(key) in (tmp_path / API_KEYS).read_text()
    assert key not in (tmp_path / API_KEYS).read_text() + second
    assert "nats.example.org" in first
    assert re.search(r"created .*worker gpu-1 only", first)
    assert re.search(r"kept .*worker gpu-1 only", second)
    assert f"BATON_NATS_NKEY_FILE={tmp_path}/router/nkey" in first


@pytest.mark.parametrize(("age_days", "renews"), [(SERVER_DAYS // 3, False), (SERVER_DAYS * 3 // 4, True)])
def test_a_certificate_with_less_than_a_third_of_its_life_left_is_renewed(tmp_path, age_days, renews):
    create(tmp_path, InitRequest(), NOW)
    before = contents(tmp_path)

    made = create(tmp_path, InitRequest(), NOW + timedelta(days=age_days))

    assert changed(before, contents(tmp_path)) == ({SERVER, SERVER_KEY} if renews else set())
    assert made.server.ends_at - (NOW + timedelta(days=age_days)) > timedelta(days=SERVER_DAYS / 3)


@pytest.mark.parametrize(
    ("age_days", "says"),
    [(SERVER_DAYS - 10, r"expires in \d+ days.*--renew"), (SERVER_DAYS + 1, "has expired.*--renew")],
)
def test_an_expiring_certificate_that_cannot_be_renewed_is_reported(tmp_path, age_days, says):
    create(tmp_path, InitRequest(), NOW - timedelta(days=age_days))
    ca_key = (tmp_path / AUTHORITY_KEY).read_bytes()
    (tmp_path / AUTHORITY_KEY).unlink()

    assert re.search(says, init(tmp_path))
    (tmp_path / AUTHORITY_KEY).write_bytes(ca_key)
    assert not re.search(says, init(tmp_path, "--renew"))


def test_a_name_missing_in_the_certificate_is_reported(tmp_path):
    init(tmp_path)

    assert "does not name nats.example.org" in init(tmp_path, "--host", "nats.example.org")


def test_an_invalid_worker_id_gets_no_key(tmp_path):
    done = CliRunner().invoke(app, ["init", str(tmp_path / "keys"), "--worker", "a.b"])

    assert done.exit_code == 1
    assert not (tmp_path / "keys").exists()


def test_unreadable_files_are_named(tmp_path):
    create(tmp_path, InitRequest(), NOW)
    (tmp_path / SERVER).write_text("nonsense")

    done = CliRunner().invoke(app, ["init", str(tmp_path)])

    assert done.exit_code == 1
    assert (tmp_path / SERVER).read_text() == "nonsense"
