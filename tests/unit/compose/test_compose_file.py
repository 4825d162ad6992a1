"""What the compose file tells our processes is what they understand; not even docker is needed for that."""

from __future__ import annotations

import re

import pytest
import yaml

from services.collector.access import check as check_collector
from services.collector.settings import Settings as CollectorSettings
from services.router.service import check
from services.router.settings import Settings as RouterSettings
from services.worker.settings import Settings
from shared.contracts.workers import Role
from shared.runtime.settings import SettingsError, load, load_common
from tests.support.processes import ROOT

WORKERS = ["prefill", "decode", "store", "sim-prefill", "sim-decode", "sim-store"]
VARIABLE = re.compile(r"\$\{(\w+):([-+])([^}]*)\}")
SERVICES = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
BUILDERS = {"light": "init", "engine-cpu": "prefill"}
"""The service that builds the image of all others."""


def environment(service: str, **given: str) -> dict[str, str]:
    """As it is when nobody has set anything but what is ``given``."""

    def value(found: re.Match[str]) -> str:
        name, when, text = found.groups()
        return given.get(name, text) if when == "-" else text if given.get(name) else ""

    return {name: VARIABLE.sub(value, told) for name, told in SERVICES[service]["environment"].items()}


@pytest.mark.parametrize("name", WORKERS)
def test_the_compose_file_sets_only_known_worker_settings(name: str):
    settings = load(Settings, "WORKER_", environment(name))

    assert load_common(environment(name)).nats_url == "tls://nats:4222"
    assert settings.role is Role(name.removeprefix("sim-"))
    assert settings.engine == ("simulated" if name.startswith("sim-") else "vllm")


@pytest.mark.parametrize("name", ["store", "sim-store"])
def test_a_store_finds_its_files_again_in_another_container(name: str):
    service = SERVICES[name]
    (volume,) = [volume for volume in service["volumes"] if not volume.endswith(":ro")]
    image = service["image"].partition(":")[0].removeprefix("baton-")
    source, folder = volume.split(":")

    assert source in yaml.safe_load((ROOT / "compose.yaml").read_text())["volumes"]
    assert "keys-store:/keys/own:ro" in service["volumes"]  # with one key, for the id store
    assert "BATON_STATE_DIR" not in environment(name)  # so its home is where they are
    # A new volume belongs to whom the image's folder belongs to, who is not root.
    text = (ROOT / SERVICES[BUILDERS[image]]["build"]["dockerfile"]).read_text()
    made, owned, user = f"mkdir -p /home/baton/.cache {folder}", "chown -R baton /home/baton", "USER baton"
    assert made in text
    assert owned in text
    assert user in text.split("FROM")[-1]
    assert "user" not in service


def router(**given: str) -> RouterSettings:
    return load(RouterSettings, "ROUTER_", environment("router", **given))


def test_a_loopback_router_requires_no_key():
    settings = router()

    check(settings)
    assert settings.keys_file == ""
    assert SERVICES["router"]["ports"] == ["${BIND:-127.0.0.1}:${PORT:-8000}:8000"]


def test_a_published_console_requires_keys_or_an_explicit_opt_out():
    def collector(**given: str) -> CollectorSettings:
        return load(CollectorSettings, "COLLECTOR_", environment("collector", **given))

    check_collector(collector(BIND="0.0.0.0"))
    with pytest.raises(SettingsError, match="baton keys new"):
        check_collector(collector(CONSOLE_BIND="0.0.0.0"))
    check_collector(collector(CONSOLE_BIND="0.0.0.0", INSECURE="true"))


def test_a_published_router_requires_keys_or_an_explicit_opt_out():
    with pytest.raises(SettingsError, match="baton keys new"):
        check(router(BIND="0.0.0.0"))
    check(router(BIND="0.0.0.0", INSECURE="true"))
    with_keys = router(BIND="0.0.0.0", KEYS_FILE="./keys.toml")
    (mounted,) = [one for one in SERVICES["router"]["volumes"] if isinstance(one, dict)]
    # In the short form a name without a slash would be a volume, and a wrong path a new folder.
    assert mounted == {
        "type": "bind",
        "source": "${KEYS_FILE:-/dev/null}",
        "target": with_keys.keys_file,
        "read_only": True,
        "bind": {"create_host_path": False},
    }


def test_a_published_router_takes_the_keys_that_the_baton_service_writes():
    with_keys = router(BIND="0.0.0.0", API_KEYS="true")

    assert with_keys.keys_file == "/keys/api/keys.toml"
    assert "keys-api:/keys/api:ro" in SERVICES["router"]["volumes"]
    assert "keys-api:/keys/api:ro" in SERVICES["collector"]["volumes"]
    assert "keys-api:/keys/api" in SERVICES["baton"]["volumes"]


def test_one_service_builds_the_image_of_all_others():
    """Several builds of one tag have several digests, and `up` recreates the containers of all but the last."""
    images = {name: service["image"].partition(":")[0] for name, service in SERVICES.items()}

    assert {name for name, service in SERVICES.items() if "build" in service} == set(BUILDERS.values())
    for name, image in images.items():
        if image.startswith("baton-"):
            assert images[BUILDERS[image.removeprefix("baton-")]] == image
            assert SERVICES[name]["pull_policy"] == "never"


@pytest.mark.parametrize("name", [*WORKERS, "attached"])
def test_a_drained_worker_is_not_started_again_by_the_restart_policy(name: str):
    assert SERVICES[name]["restart"] == "unless-stopped"
    assert load(Settings, "WORKER_", {"WORKER_STAY_DRAINED": environment(name)["WORKER_STAY_DRAINED"]}).stay_drained


def test_a_profile_with_a_store_has_its_engines():
    for profile, store in (("store", ""), ("simulated-store", "sim-")):
        assert {f"{store}{role}" for role in ("prefill", "decode", "store")} == {
            name for name, service in SERVICES.items() if profile in service.get("profiles", [])
        }


def test_settings_and_their_secrets_stay_out_of_git():
    assert ".env" in (ROOT / ".gitignore").read_text().splitlines()
    assert ".env" in (ROOT / ".dockerignore").read_text().splitlines()
