"""The manifests against Kubernetes' own schemas, and against what they promise of each other."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from services.launcher.cluster.folder import ExistingFiles, InitRequest, owners, plan_files
from services.launcher.cluster.kubernetes import place_of
from shared.contracts.channels import Party
from shared.contracts.permissions import owner_of
from tests.nightly.kubernetes.processes import Build
from tests.support.processes import ROOT

pytestmark = pytest.mark.timeout(600)

OVERLAYS = sorted(path.parent.name for path in (ROOT / "kubernetes").glob("*/kustomization.yaml"))
OLDEST, NEWEST = "1.30", "1.37"
WORKLOADS = {"Job", "Deployment", "StatefulSet"}


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_each_object_has_its_schema(overlay: str, version: str, build: Build, validator: Path, tmp_path: Path):
    path = tmp_path / "objects.yaml"
    path.write_text(yaml.safe_dump_all(build(overlay)))
    command = [str(validator), "--strict", "--kubernetes-version", version, str(path)]

    def validate() -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, capture_output=True, text=True, check=False)

    done = validate()
    assert done.returncode == 0, done.stdout + done.stderr
    path.write_text(path.read_text().replace("readOnlyRootFilesystem", "readOnlyRootFileSystem"))
    assert validate().returncode != 0, "a field that does not exist is found"


def pods(objects: list[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    for each in objects:
        if each["kind"] in WORKLOADS:
            yield each["metadata"]["name"], each["spec"]["template"]["spec"]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_pods_are_confined(overlay: str, build: Build):
    """As the Pod Security Standard `restricted` says, which only the GPUs' shared memory contradicts."""
    objects = build(overlay)
    (namespace,) = (each for each in objects if each["kind"] == "Namespace")
    level = namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"]

    assert level == ("privileged" if overlay == "cuda" else "restricted")
    for name, pod in pods(objects):
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert "hostNetwork" not in pod
        assert pod.get("hostIPC", False) is (overlay == "cuda" and name in {"prefill", "decode"})
        assert pod.get("automountServiceAccountToken") is not (name != "keys"), "only the job uses the API server"
        assert not any("hostPath" in volume for volume in pod["volumes"])
        for container in pod["containers"]:
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
            assert container["securityContext"]["allowPrivilegeEscalation"] is False
            assert container["securityContext"]["readOnlyRootFilesystem"] is True
            assert container["resources"]["limits"]["memory"]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_each_mounted_secret_is_one_that_the_job_makes(overlay: str, build: Build):
    objects = build(overlay)
    mounted = {v["secret"]["secretName"] for _, pod in pods(objects) for v in pod["volumes"] if "secret" in v}
    request = InitRequest(workers=("prefill-0", "decode-0"))
    made = {place_of(f"{owner.replace('.', '-', 1)}/nkey")[0] for owner in owners(ExistingFiles(), request)}
    assert plan_files(request, ExistingFiles()).api_key
    assert mounted <= made | {"keys-nats", "api-keys"}
    assert {f"keys-{party.value}" for party in Party} <= made, "the folders are called like the parties"
    assert owner_of(Party.ROUTER) in owners(ExistingFiles(), request)


def test_only_nats_and_http_are_reached_and_engines_reach_engines(build: Build):
    policies = {each["metadata"]["name"]: each["spec"] for each in build("base") if each["kind"] == "NetworkPolicy"}

    assert policies["nothing"] == {"podSelector": {}, "policyTypes": ["Ingress"]}
    (kv,) = policies["kv"]["ingress"]
    assert kv["from"] == [{"podSelector": policies["kv"]["podSelector"]}]
    assert [each["port"] for rule in policies["http"]["ingress"] for each in rule["ports"]] == ["http"]


def test_the_overlay_of_the_documentation_sets_what_it_says(build: Build, tmp_path: Path):
    (written,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs/kubernetes.md").read_text(), flags=re.DOTALL)
    (tmp_path / "kubernetes").symlink_to(ROOT / "kubernetes")
    (tmp_path / "my").mkdir()
    (tmp_path / "my/kustomization.yaml").write_text(written)

    objects = build(str(tmp_path / "my"))

    replicas = {each["metadata"]["name"]: each["spec"]["replicas"] for each in objects if each["kind"] == "StatefulSet"}
    assert replicas == {"nats": 1, "prefill": 2, "decode": 6}
    images = {container["image"] for _, pod in pods(objects) for container in pod["containers"]}
    assert images == {"REGISTRY/baton-light:1", "REGISTRY/baton-engine-cuda:1", "nats:2.15.1-alpine"}
    (settings,) = (each for each in objects if each["kind"] == "ConfigMap" and each["metadata"]["name"] == "settings")
    assert settings["metadata"]["namespace"] == "baton"
    assert settings["data"]["WORKER_MODEL"] == "Qwen/Qwen3-8B"
