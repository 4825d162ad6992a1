"""In the compose file each service sees its own party's key and no other; not even docker is needed for that."""

from __future__ import annotations

import re
from pathlib import PurePosixPath

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
    **dict.fromkeys(["prefill", "decode", "store", "attached", "sim-prefill", "sim-decode", "sim-store"], Party.WORKER),
}


def keys_seen_by(service: str) -> dict[str, str]:
    """Volumes with keys: the folder, and how it is mounted."""
    volumes = [volume for volume in SERVICES[service].get("volumes", []) if isinstance(volume, str)]
    mounts = [volume.split(":", 1) for volume in volumes if volume.startswith("keys-")]
    return {source.removeprefix("keys-"): where for source, where in mounts}


def nats_keys_seen_by(service: str) -> dict[str, str]:
    """Without the clients' API keys."""
    return {source: where for source, where in keys_seen_by(service).items() if source != "api"}


@pytest.mark.parametrize("service", PARTY)
def test_a_service_sees_its_own_key_and_cannot_change_it(service: str):
    environment = SERVICES[service]["environment"]

    assert nats_keys_seen_by(service) == {PARTY[service]: f"{OWN}:ro"}
    assert environment["BATON_NATS_NKEY_FILE"] == f"{OWN}/{NKEY}"
    assert environment["BATON_NATS_CA_FILE"] == f"{OWN}/{TRUSTED}"
    assert environment["BATON_NATS_URL"].startswith("tls://")


def test_every_service_of_ours_is_of_some_party():
    assert {name for name, service in SERVICES.items() if "baton-" in service["image"]} == {*PARTY, "init"}


def test_only_the_certificate_service_mounts_the_ca_key():
    folder = PurePosixPath(AUTHORITY_KEY).parts[0]

    assert [name for name in SERVICES if folder in keys_seen_by(name)] == ["init"]


def test_generated_files_lie_in_volumes_of_the_images_user():
    command = SERVICES["init"]["command"]
    made = plan_files(InitRequest(), ExistingFiles()).nkeys
    seen = keys_seen_by("init")
    image = (ROOT / "compose" / "light.Dockerfile").read_text()

    assert command[:3] == ["baton", "init", "/keys"]
    assert seen == {folder: f"/keys/{folder}" for folder in {*made, "ca", "nats", "api"}}
    assert {f"keys-{folder}" for folder in seen} <= COMPOSE["volumes"].keys()
    for folder in ("data", *(f"keys/{folder}" for folder in seen)):
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
