"""In the compose file each service sees its own party's key and no other, and each worker uses one of its own; not even
docker is needed for that.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path, PurePosixPath

import pytest
import yaml

from services.launcher.cluster.folder import (
    AUTHORITY_KEY,
    NKEY,
    SECURE,
    TRUSTED,
    ExistingFiles,
    InitRequest,
    plan_files,
    variables,
)
from shared.contracts.channels import Party
from tests.support.processes import ROOT

COMPOSE = yaml.safe_load((ROOT / "compose.yaml").read_text())
SERVICES = COMPOSE["services"]
OWN = "/keys/own"
PARTY = {
    "orchestrator": Party.ORCHESTRATOR,
    "collector": Party.COLLECTOR,
    "router": Party.ROUTER,
    "baton": Party.LAUNCHER,
}
WORKERS = {
    "prefill": "prefill",
    "decode": "decode",
    "store": "store",
    "attached": "attached",
    "sim-prefill": "prefill",
    "sim-decode": "decode",
    "sim-store": "store",
}
"""Services of workers, and whose keys they see."""
ROLES = sorted({*WORKERS.values()})
HANGS_S = 300.0
"""Longer than any of the commands takes on a loaded machine."""


def keys_seen_by(service: str) -> dict[str, str]:
    """Volumes with keys: the folder, and how it is mounted."""
    volumes = [volume for volume in SERVICES[service].get("volumes", []) if isinstance(volume, str)]
    mounts = [volume.split(":", 1) for volume in volumes if volume.startswith("keys-")]
    return {source.removeprefix("keys-"): where for source, where in mounts}


def nats_keys_seen_by(service: str) -> dict[str, str]:
    """Without the clients' API keys."""
    return {source: where for source, where in keys_seen_by(service).items() if source != "api"}


def check_keys(service: str, volume: str, used: str) -> None:
    """The service sees only this volume of keys, read-only, and reads its key and the CA in the folder ``used``."""
    environment = SERVICES[service]["environment"]
    assert nats_keys_seen_by(service) == {volume: f"{OWN}:ro"}
    assert environment["BATON_NATS_NKEY_FILE"] == f"{used}/{NKEY}"
    assert environment["BATON_NATS_CA_FILE"] == f"{used}/{TRUSTED}"
    assert environment["BATON_NATS_URL"].startswith("tls://")


@pytest.mark.parametrize("service", PARTY)
def test_a_service_sees_its_own_key_and_cannot_change_it(service: str):
    check_keys(service, PARTY[service], OWN)


@pytest.mark.parametrize("service", WORKERS)
def test_a_worker_sees_the_keys_of_its_service_and_cannot_change_them(service: str):
    check_keys(service, WORKERS[service], "/tmp/key")


def test_every_service_of_ours_is_of_some_party():
    assert {name for name, service in SERVICES.items() if "baton-" in service["image"]} == {*PARTY, *WORKERS, "init"}


def as_here(command: list[str], places: dict[str, Path]) -> list[str]:
    """A command of the compose file, with other folders."""
    line = [word.replace("$$", "$") for word in command]
    for place, here in places.items():
        line = [word.replace(place, str(here)) for word in line]
    return line


@contextmanager
def worker(folder: Path, own: Path) -> Iterator[str]:
    """A worker's command, with a program that waits in place of the worker; gives the id that it has, or what it said."""
    key = folder / "key"
    program = folder / "python"
    program.write_text('#!/bin/sh\necho "$WORKER_WORKER_ID"; exec sleep 60\n')
    program.chmod(0o700)
    command = as_here(SERVICES["decode"]["command"], {OWN: own, "/tmp/key": key})
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert process.stdout is not None
        said = process.stdout.readline().strip()
        if process.poll() is None and not said.startswith("Other"):
            assert key.resolve() == own / said
        yield said
    finally:
        process.kill()
        process.wait(HANGS_S)


def test_each_container_of_a_service_has_a_key_that_no_other_one_uses(tmp_path: Path):
    own = tmp_path / "own"
    containers = [tmp_path / str(number) for number in range(4)]
    for folder in (*containers, *(own / worker_id for worker_id in ("decode-10", "decode-2", "decode-1"))):
        folder.mkdir(parents=True)

    with ExitStack() as running:
        first = ExitStack()
        ids = [first.enter_context(worker(containers[0], own))]
        ids += [running.enter_context(worker(folder, own)) for folder in containers[1:3]]
        with worker(containers[3], own) as refused:
            assert "use all of its keys" in refused
        first.close()
        again = running.enter_context(worker(containers[0], own))

    assert (ids, again) == (["decode-1", "decode-2", "decode-10"], "decode-1")


@pytest.mark.slow
def test_init_makes_workers_keys_and_gives_each_service_its_own(tmp_path: Path):
    for role in ROLES:
        (tmp_path / f"of-{role}").mkdir()
    (tmp_path / "baton").write_text(f'#!/bin/sh\nexec {sys.executable} -m services.launcher.cli "$@"\n')
    (tmp_path / "baton").chmod(0o700)
    keys = {role: lambda role=role: {one.name: one for one in (tmp_path / f"of-{role}").iterdir()} for role in ROLES}
    command = as_here(SERVICES["init"]["command"], {"/keys": tmp_path})
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    seeds = []
    for _time in range(2):  # A second one keeps them.
        subprocess.run(command, env=environment, check=True, capture_output=True, timeout=HANGS_S)
        seeds.append({name: (one / NKEY).read_text() for role in ROLES for name, one in keys[role]().items()})

    assert seeds[0] == seeds[1]
    assert {role: set(keys[role]()) for role in ROLES} == {
        "store": {"store"},
        **{role: {f"{role}-{number}" for number in range(1, 17)} for role in ("prefill", "decode", "attached")},
    }
    assert len({*seeds[0].values()}) == len(seeds[0])
    users = re.findall(r"# worker\.(\S+)\n", (tmp_path / SECURE).read_text())
    assert set(users) == set(seeds[0])
    for one in (one for role in ROLES for one in keys[role]().values()):
        assert {file.name for file in one.iterdir()} == {NKEY, TRUSTED}
        assert all(file.stat().st_mode & 0o077 == 0 for file in (one, *one.iterdir()))


def test_only_the_certificate_service_mounts_the_ca_key_and_all_workers_keys():
    for folder in (PurePosixPath(AUTHORITY_KEY).parts[0], "all"):
        assert [name for name in SERVICES if folder in keys_seen_by(name)] == ["init"]


def test_generated_files_lie_in_volumes_of_the_images_user():
    made = {*plan_files(InitRequest(), ExistingFiles()).nkeys} - {Party.WORKER}
    seen = keys_seen_by("init")
    image = (ROOT / "compose" / "light.Dockerfile").read_text().replace("\\\n", "")

    parties = {folder: f"/keys/{folder}" for folder in {*made, "ca", "nats", "api"}}
    assert seen == {"all": "/keys", **parties, **{role: f"/keys/of-{role}" for role in ROLES}}
    assert {f"keys-{folder}" for folder in seen} <= COMPOSE["volumes"].keys()
    for folder in ("data", *(where.removeprefix("/") for where in seen.values())):
        assert re.search(rf"mkdir -p [^\n]*\b{folder}\b", image), folder
    assert "chown -R baton data keys" in image


def test_nats_starts_after_its_keys_as_their_owner_and_not_as_root():
    nats = SERVICES["nats"]
    config = (ROOT / "compose" / "nats.conf").read_text()
    included = re.search(r'^include "(.+)"$', config, re.MULTILINE)
    uid = re.search(r"useradd --uid (\d+)", (ROOT / "compose" / "light.Dockerfile").read_text())

    assert nats["depends_on"] == {"init": {"condition": "service_completed_successfully"}}
    assert keys_seen_by("nats") == {"nats": "/keys/nats:ro"}
    assert included is not None
    assert _joined("/etc/nats", included[1]) == f"/keys/{SECURE}"
    assert uid is not None
    assert nats["user"].split(":")[0] == uid[1]
    assert "nats-data:/data" in SERVICES["init"]["volumes"]  # so that it has its owner before NATS needs it


def test_baton_init_prints_the_settings_of_the_compose_file():
    assert {name: value.replace("/keys/router", OWN) for name, value in variables("/keys", "router").items()} == {
        name: SERVICES["router"]["environment"][name] for name in variables("/keys", "router")
    }


def _joined(folder: str, path: str) -> str:
    """As nats-server does it: never from the root."""
    parts: list[str] = []
    for part in PurePosixPath(f"{folder}/{path}").parts:
        parts = parts[:-1] if part == ".." else [*parts, part]
    return str(PurePosixPath(*parts))
