"""``baton init --secrets``: the key folder as Secrets of Kubernetes, there and back."""

from __future__ import annotations

import shutil
import tomllib
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from services.launcher.cluster.files import create
from services.launcher.cluster.folder import CannotCreate, InitRequest
from services.launcher.cluster.kubernetes import Secrets, file_of, names_of, place_of, read_folder
from shared.bus.nats_credentials import read_seed
from shared.contracts.api_keys import Permission, digest_of
from shared.kubernetes import ServiceAccount
from tests.support.kubernetes_api import KubernetesApi, kubernetes_api

NOW = datetime(2026, 1, 1, tzinfo=UTC)
WORKERS = ("prefill-0", "prefill-1", "decode-0", "router-0")
RULES = (
    {"apiGroups": [""], "resources": ["secrets"], "verbs": ["create"]},
    {"apiGroups": [""], "resources": ["secrets"], "resourceNames": names_of(WORKERS), "verbs": ["get", "update"]},
)
"""What the job's service account may do."""


@pytest.fixture
def account(tmp_path: Path) -> Path:
    return tmp_path / "account"


@pytest.fixture
def api(account: Path) -> Iterator[KubernetesApi]:
    with kubernetes_api(account, RULES) as serving:
        yield serving


def initialise(api: KubernetesApi, account: Path, folder: Path, *workers: str, renew: bool = False) -> list[str]:
    """As the job does, in a folder that is empty before; returns the Secrets that were written."""
    shutil.rmtree(folder, ignore_errors=True)
    secrets = Secrets(workers, ServiceAccount(account, api.url))
    secrets.restore(folder)
    made = create(folder, InitRequest(workers=workers, renew=renew), NOW)
    return secrets.store(folder, made.api_key)


def test_each_file_has_its_place_and_comes_back_from_it(tmp_path: Path):
    create(tmp_path / "keys", InitRequest(workers=WORKERS), NOW)

    files = list(read_folder(tmp_path / "keys"))

    kept = [file for file in files if not (file.startswith("worker-") and file.endswith("ca.pem"))]
    assert len(kept) > 15
    assert [file_of(*place_of(file)) for file in kept] == kept
    assert place_of("worker-prefill-1/nkey") == ("keys-workers-prefill", "prefill-1.nkey")
    assert place_of("worker-router-0/nkey")[0] != place_of("router/nkey")[0]


def test_a_pod_of_a_role_finds_its_own_key_and_the_ca(api: KubernetesApi, account: Path, tmp_path: Path):
    initialise(api, account, tmp_path / "keys", *WORKERS)

    files = api.files("keys-workers-prefill")
    assert sorted(files) == ["ca.pem", "prefill-0.nkey", "prefill-1.nkey"]
    assert files["ca.pem"] == api.files("keys-router")["ca.pem"] == api.files("keys-ca")["ca.pem"]
    (tmp_path / "nkey").write_bytes(files["prefill-1.nkey"])
    assert read_seed(tmp_path / "nkey").public_key in api.files("keys-nats")["secure.conf"].decode()
    assert api.files("admin-key")["key"].startswith(b"baton-")
    assert sorted(api.files("api-keys")) == ["keys.toml"]


def test_a_second_run_keeps_every_key_and_writes_what_is_new(api: KubernetesApi, account: Path, tmp_path: Path):
    initialise(api, account, tmp_path / "keys", *WORKERS)
    before = {name: api.files(name) for name in api.secrets}
    api.asked.clear()

    assert initialise(api, account, tmp_path / "keys", *WORKERS) == []
    assert api.asked == []
    assert initialise(api, account, tmp_path / "keys", *WORKERS, "prefill-2") == ["keys-nats", "keys-workers-prefill"]
    assert api.files("keys-workers-prefill").items() > before["keys-workers-prefill"].items()
    assert initialise(api, account, tmp_path / "keys", *WORKERS, renew=True) == ["keys-nats"]
    assert api.files("keys-nats")["server.pem"] != before["keys-nats"]["server.pem"]
    assert api.files("admin-key") == before["admin-key"]


def test_what_the_api_server_refuses_is_said(api: KubernetesApi, account: Path, tmp_path: Path):
    api.rules = RULES[1:]

    with pytest.raises(CannotCreate, match="refuses POST /api/v1/namespaces/baton/secrets: 403"):
        initialise(api, account, tmp_path / "keys")
    api.rules = RULES[:1]
    with pytest.raises(CannotCreate, match="refuses GET /api/v1/namespaces/baton/secrets/keys-ca: 403"):
        initialise(api, account, tmp_path / "keys")


def test_outside_of_a_cluster_it_says_what_it_is_for():
    with pytest.raises(CannotCreate, match="for a pod with a service account that may write Secrets"):
        Secrets(WORKERS)


def test_prometheus_gets_a_key_that_may_only_look_also_where_keys_exist_already(
    api: KubernetesApi, account: Path, tmp_path: Path
):
    initialise(api, account, tmp_path / "keys", *WORKERS)
    before = api.files("api-keys")["keys.toml"]
    del api.secrets["metrics-key"]

    assert initialise(api, account, tmp_path / "keys", *WORKERS) == ["api-keys", "metrics-key"]

    after = api.files("api-keys")["keys.toml"]
    assert after.startswith(before.rstrip())
    digest = digest_of(api.files("metrics-key")["key"])
    [entry] = [each for each in tomllib.loads(after.decode())["key"] if each["sha256"] == digest]
    assert entry["permissions"] == [Permission.VIEW]
