"""What the compose file tells our processes is what they understand; not even docker is needed for that."""

from __future__ import annotations

import re

import msgspec
import pytest
import yaml

from services.collector.access import check as check_collector
from services.collector.settings import Settings as CollectorSettings
from services.orchestrator.settings import Settings as OrchestratorSettings
from services.router.service import check
from services.router.settings import Settings as RouterSettings
from services.worker.settings import Settings
from shared.contracts.workers import Role
from shared.runtime.settings import CommonSettings, SettingsError, load, load_common
from tests.support.processes import ROOT

WORKERS = ["prefill", "decode", "store", "sim-prefill", "sim-decode", "sim-store"]
VARIABLE = re.compile(r"\$\{(\w+):([-+])([^${}]*)\}")
"""One without another in it."""
SERVICES = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
BUILDERS = {"light": "init", "engine-cpu": "prefill"}
"""The service that builds the image of all others."""


def environment(service: str, **given: str) -> dict[str, str]:
    """As it is when nobody has set anything but what is ``given``."""

    def value(found: re.Match[str]) -> str:
        name, when, text = found.groups()
        return given.get(name, text) if when == "-" else text if given.get(name) else ""

    def resolved(text: str) -> str:
        while (inner := VARIABLE.sub(value, text)) != text:
            text = inner
        return text

    told = SERVICES[service]["environment"].items()
    passed = {name: given[name] for name, text in told if text is None and name in given}
    return passed | {name: resolved(text) for name, text in told if text is not None}


FIXED = {
    "BATON_NATS_URL": "the NATS of the file",
    "BATON_NATS_NKEY_FILE": "made by init",
    "BATON_NATS_CA_FILE": "made by init",
    "BATON_STATE_DIR": "a volume",
    "BATON_CACHE_DIR": "a volume or memory",
    "ROUTER_HOST": "a container listens everywhere; BIND says where its port is published",
    "ROUTER_PORT": "PORT is the published one",
    "ROUTER_SHARED_PORT": "for processes of one machine: containers have an address each",
    "ROUTER_INSTANCE": "must differ between the containers of --scale",
    "COLLECTOR_HOST": "a container listens everywhere; CONSOLE_BIND says where its port is published",
    "COLLECTOR_PORT": "the published one",
    "ORCHESTRATOR_INSTANCE": "must differ between the containers of --scale",
    "ORCHESTRATOR_STATEFUL_SETS": "of Kubernetes, which compose is not",
    "WORKER_WORKER_ID": "that of the container's key",
    "WORKER_ROLE": "of the service",
    "WORKER_ENGINE": "of the service",
    "WORKER_STAY_DRAINED": "of the restart policy",
    **{
        f"WORKER_DATA_PARALLEL_{name}": "its workers find each other in one network namespace; a container has its own"
        for name in ("SIZE", "RANK", "GROUP", "PORT")
    },
    "WORKER_KV_HOST": "must differ between containers; the default is right in their network",
}
"""Settings that an operator cannot set in compose, under their own or a shorter name, and why."""
NAMED_OTHERWISE = {
    "ROUTER_PUBLISHED_HOST": "BIND",
    "COLLECTOR_PUBLISHED_HOST": "CONSOLE_BIND",
    "ROUTER_KEYS_FILE": "KEYS_FILE",
    "COLLECTOR_ADMIN_KEY_FILE": "KEYS_FILE",
    "ROUTER_SALT_FILE": "SALT_FILE",
    "ROUTER_FAILURE_POLICY": "FAILURE_POLICY",
    "WORKER_CPU_CORES": "PREFILL_CORES, DECODE_CORES",
    "WORKER_LORA_DIR": "LORA_FOLDER",
    "WORKER_WEIGHTS_DIR": "WEIGHTS_FOLDER",
}
"""Settings of files, addresses and single services, which have only another name in compose."""
OF_THAT_SERVER = {"WORKER_ATTACH_KEY_FILE", "WORKER_SERVED_MODEL_NAME", "WORKER_LEGS_MAX"}
"""Settings that have only another name for the service `attached`."""
ATTACHED = {f"WORKER_ATTACH_{name}" for name in ("URL", "MODEL", "KEY_FILE", "SILENT_S_MAX")}
OF_ENGINES = {
    f"WORKER_{name}"
    for name in ("MODEL", "ENGINE_ARGS", "CPU_CORES", "TENSOR_PARALLEL_SIZE", "PIPELINE_PARALLEL_SIZE", "CONNECTOR")
}
OF_WEIGHTS = {"WORKER_LORA_DIR", "WORKER_LORA_ADAPTERS", "WORKER_WEIGHTS_DIR"}
OF_STORES = {
    "WORKER_STORE_MEMORY_BYTES",
    "WORKER_STORE_FILES_BYTES",
    "WORKER_STORE_OBJECTS_URL",
    "WORKER_STORE_OBJECTS_BYTES",
}
OF_KV = {f"WORKER_{name}" for name in ("KV_CACHE_BYTES", "CACHE_HIT_THRESHOLD", "KV_FETCH_MIN_TOKENS", "KV_LEASE_S")}
OF_KV |= {"WORKER_KV_COPY_USES_MIN", "WORKER_KV_BACKEND", "WORKER_BLOCK_SIZE"}
WITHOUT_ENGINE = {"WORKER_CPU_CORES", "WORKER_ASLEEP", *OF_WEIGHTS}
OF_HOSTS = {"WORKER_NODES", "WORKER_NODE", "WORKER_HEAD_ADDRESS"}
"""A compose file is for one host."""
NOT_OF = {
    "prefill": OF_HOSTS | ATTACHED | OF_STORES | {"WORKER_SIMULATED"},
    "decode": OF_HOSTS | ATTACHED | OF_STORES | {"WORKER_SIMULATED"},
    "store": OF_HOSTS | ATTACHED | WITHOUT_ENGINE | {"WORKER_SIMULATED"},
    "sim-prefill": OF_HOSTS | ATTACHED | OF_STORES | OF_ENGINES | OF_WEIGHTS,
    "sim-decode": OF_HOSTS | ATTACHED | OF_STORES | OF_ENGINES | OF_WEIGHTS,
    "sim-store": OF_HOSTS | ATTACHED | OF_ENGINES | WITHOUT_ENGINE,
    "attached": OF_HOSTS | OF_STORES | OF_ENGINES | WITHOUT_ENGINE | OF_KV | {"WORKER_SIMULATED"},
}
"""Settings that mean nothing to a service."""
SETTINGS: dict[str, tuple[str, type[msgspec.Struct]]] = {
    "router": ("ROUTER_", RouterSettings),
    "collector": ("COLLECTOR_", CollectorSettings),
    "orchestrator": ("ORCHESTRATOR_", OrchestratorSettings),
    **dict.fromkeys(NOT_OF, ("WORKER_", Settings)),
}


def variables(prefix: str, settings: type[msgspec.Struct]) -> set[str]:
    return {f"{prefix}{one.name.upper()}" for one in msgspec.structs.fields(settings)}


@pytest.mark.parametrize("name", SETTINGS)
def test_an_operator_can_set_every_setting_without_another_compose_file(name: str):
    """A new setting is passed through in compose.yaml, or has its reason above."""
    known = variables(*SETTINGS[name]) | variables("BATON_", CommonSettings)
    told = SERVICES[name]["environment"]
    settable = {variable for variable in told if told[variable] is None or "${" in told[variable]}

    assert settable & known == known - FIXED.keys() - NOT_OF.get(name, set())
    assert not {variable for variable in told if variable.startswith(("BATON_", SETTINGS[name][0]))} - known
    assert not told.keys() & NOT_OF.get(name, set())
    otherwise = NAMED_OTHERWISE.keys() | (OF_THAT_SERVER if name == "attached" else set())
    for variable in settable & known - otherwise:
        assert environment(name, **{variable: "given"})[variable] == "given"


def test_the_reasons_are_of_settings_that_there_are():
    known = set().union(*(variables(*each) for each in SETTINGS.values()), variables("BATON_", CommonSettings))

    assert FIXED.keys() | NAMED_OTHERWISE.keys() <= known
    assert set().union(*NOT_OF.values()) <= known


def test_a_setting_without_a_value_passes_through():
    told = environment("router", ROUTER_SLOS='{"default": {"ttft_s": 2}}')

    assert load(RouterSettings, "ROUTER_", told).slos == '{"default": {"ttft_s": 2}}'


@pytest.mark.parametrize("name", WORKERS)
def test_the_compose_file_sets_only_known_worker_settings(name: str):
    settings = load(Settings, "WORKER_", environment(name))

    assert load_common(environment(name)).nats_url == "tls://nats:4222"
    assert settings.role is Role(name.removeprefix("sim-"))
    assert settings.engine == ("simulated" if name.startswith("sim-") else "vllm")


@pytest.mark.parametrize("name", ["store", "sim-store"])
def test_a_store_finds_its_files_again_in_another_container(name: str):
    service = SERVICES[name]
    (volume,) = [each for each in service["volumes"] if isinstance(each, str) and not each.endswith(":ro")]
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
    mounted = next(one for one in SERVICES["router"]["volumes"] if isinstance(one, dict))
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


def test_engines_start_without_a_profile_and_not_with_another_one():
    """Compose takes "no profile" for the profile of the empty name: the nightly tests ask it."""
    for name in ("prefill", "decode"):
        assert SERVICES[name]["profiles"] == ["", "engines", "store"]
    assert [name for name, service in SERVICES.items() if "" in service.get("profiles", [])] == ["prefill", "decode"]
    assert {"router", "orchestrator", "collector", "nats", "init"} == {
        name for name, service in SERVICES.items() if "profiles" not in service
    }


@pytest.mark.parametrize(
    ("variable", "setting", "folder"),
    [
        ("MODELS_FOLDER", "", "/models"),
        ("LORA_FOLDER", "WORKER_LORA_DIR", "/adapters"),
        ("WEIGHTS_FOLDER", "WORKER_WEIGHTS_DIR", "/weights"),
    ],
)
def test_folders_of_models_and_weights_are_seen_read_only_by_engines(variable: str, setting: str, folder: str):
    for name in ("prefill", "decode"):
        (mount,) = [one for one in SERVICES[name]["volumes"] if isinstance(one, dict) and one["target"] == folder]
        assert mount == {
            "type": "bind",
            "source": f"${{{variable}:-/dev/null}}",
            "target": folder,
            "read_only": True,
            "bind": {"create_host_path": False},
        }
        if setting:
            assert environment(name)[setting] == ""
            assert environment(name, **{variable: "./some"})[setting] == folder


def test_rdma_is_what_an_operator_gives():
    """UCX registers memory with the adapter, which locks it."""
    for name in ("prefill", "decode", "store"):
        assert SERVICES[name]["devices"] == ["${RDMA_DEVICES:-/dev/null}"]
        assert SERVICES[name]["ulimits"] == {"memlock": "${ENGINE_MEMLOCK:-65536}"}
        assert SERVICES[name]["env_file"] == ["${ENGINE_ENV_FILE:-/dev/null}"]


def test_every_variable_of_the_file_is_in_its_example():
    """Settings under their own names are on the page of settings."""
    text = (ROOT / "compose.yaml").read_text() + (ROOT / "compose/cuda.yaml").read_text()
    own = set().union(*(variables(*each) for each in SETTINGS.values()), variables("BATON_", CommonSettings))
    used = {*re.findall(r"(?<!\$)\$\{(\w+)", text)} - own

    named = set(re.findall(r"^#? ?([A-Z_]+)=", (ROOT / "compose/env.example").read_text(), re.MULTILINE))
    assert used - named == {"BATON_COMMIT", "BATON_TAG", "BASE_IMAGE"}


def test_a_profile_with_a_store_has_its_engines():
    for profile, store in (("store", ""), ("simulated-store", "sim-")):
        assert {f"{store}{role}" for role in ("prefill", "decode", "store")} == {
            name for name, service in SERVICES.items() if profile in service.get("profiles", [])
        }


def test_settings_and_their_secrets_stay_out_of_git():
    assert ".env" in (ROOT / ".gitignore").read_text().splitlines()
    assert ".env" in (ROOT / ".dockerignore").read_text().splitlines()
