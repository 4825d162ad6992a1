"""The manifests and the chart against Kubernetes' own schemas and policies, and against what they promise of each other."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml

from scripts.render_kubernetes import BASE, BY_HAND, rendered
from services.launcher.cluster.folder import ExistingFiles, InitRequest, plan_files
from services.launcher.cluster.kubernetes import names_of
from services.orchestrator.planner.scalers import StatefulSet, read_stateful_sets
from shared.contracts.channels import CHANNELS, Party
from shared.contracts.workers import Role
from tests.nightly.kubernetes.conftest import Render, objects_of
from tests.nightly.kubernetes.network import allows
from tests.nightly.kubernetes.processes import Build
from tests.support.kubernetes_api import kubernetes_api
from tests.support.processes import ROOT
from tests.support.system import baton

pytestmark = pytest.mark.timeout(600)

OVERLAYS = sorted(path.parent.name for path in (ROOT / "kubernetes").glob("*/kustomization.yaml"))
CHART = ROOT / "services/launcher/service_files/chart"
OLDEST, NEWEST = "1.30", "1.37"
WORKLOADS = {"Job", "Deployment", "StatefulSet"}
EVERYTHING: dict[str, Any] = {
    "settings": {"WORKER_MODEL": "Qwen/Qwen3-8B", "WORKER_KV_CACHE_BYTES": 1 << 31, "ORCHESTRATOR_PLANNER_ITL_S": 0.04},
    "settingsSecret": "tokens",
    "images": {"engine": "baton-engine-cuda:dev", "pullSecrets": ["registry"]},
    "orchestrator": {"planner": True},
    "collector": {"serviceMonitor": True, "serviceMonitorLabels": {"release": "prometheus"}},
    "worker": {
        "near": "topology.kubernetes.io/zone",
        "modelsVolume": {"persistentVolumeClaim": {"claimName": "models"}},
    },
    "nats": {"storageClass": "fast"},
    "workers": {
        "prefill": {"role": "prefill", "gpus": 1, "rdma": {"rdma/hca": 1}, "replicas": 2},
        "decode": {
            "role": "decode",
            "gpus": 2,
            "replicasMax": 4,
            "limits": {"memory": "96Gi"},
            "settings": {"WORKER_LEGS_MAX": 9},
            "pod": {"hostIPC": True, "nodeSelector": {"gpu": "h200"}},
        },
        "store": {"role": "store"},
        "cloud": {
            "role": "both",
            "attachKeySecret": "cloud-key",
            "settings": {"WORKER_ENGINE": "attached", "WORKER_ATTACH_URL": "https://example.com"},
        },
    },
}
"""Values that use all that the chart can."""
SKIPPED = {
    "CKV_K8S_11": "a limit of CPU throttles processes that answer within milliseconds",
    "CKV_K8S_15": "a pull for each start of a pod makes the registry a part of serving; images have tags that stay",
    "CKV_K8S_43": "operators name the images, by digest if they like",
}
KNOWN = {
    *(("CKV_K8S_8", name) for name in ("decode", "prefill", "orchestrator", "tools")),  # What asks goes over NATS.
    ("CKV_K8S_9", "tools"),  # A shell to type in.
    ("CKV_K8S_38", "keys"),  # The job writes Secrets.
}
"""What Checkov finds and why it stays."""


@pytest.fixture(scope="module", params=[*OVERLAYS, "chart"])
def objects(request: pytest.FixtureRequest, build: Build, render: Render) -> list[dict[str, Any]]:
    """Of an overlay, or of the chart with all that it can."""
    return render(EVERYTHING) if request.param == "chart" else build(request.param)


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
def test_each_object_has_its_schema(objects: list[dict[str, Any]], version: str, checkers: Path, tmp_path: Path):
    path = tmp_path / "objects.yaml"
    path.write_text(yaml.safe_dump_all(each for each in objects if each["kind"] != "ServiceMonitor"))
    command = [str(checkers / "kubernetes-validate"), "--strict", "--kubernetes-version", version, str(path)]

    def validate() -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, capture_output=True, text=True, check=False)

    done = validate()
    assert done.returncode == 0, done.stdout + done.stderr
    path.write_text(path.read_text().replace("readOnlyRootFilesystem", "readOnlyRootFileSystem"))
    assert validate().returncode != 0, "a field that does not exist is found"


SERVICE_MONITOR = """
import sys, yaml
from cloudcoil.models.prometheus_operator.v1 import ServiceMonitor
given = yaml.safe_load(sys.stdin)
read = ServiceMonitor.model_validate(given).model_dump(by_alias=True, exclude_unset=True)
sys.exit(0 if read["spec"] == given["spec"] else f"not all of it is known: {read['spec']}")
"""


def test_prometheus_operator_reads_the_service_monitor(render: Render, checkers: Path):
    [monitor] = [each for each in render(EVERYTHING) if each["kind"] == "ServiceMonitor"]

    def check(text: str) -> subprocess.CompletedProcess[str]:
        command = [str(checkers / "python"), "-c", SERVICE_MONITOR]
        return subprocess.run(command, input=text, capture_output=True, text=True, check=False)

    assert check(yaml.safe_dump(monitor)).returncode == 0, check(yaml.safe_dump(monitor)).stderr
    assert check(yaml.safe_dump(monitor).replace("credentials", "credential")).returncode != 0
    assert monitor["metadata"]["labels"]["release"] == "prometheus"
    assert monitor["spec"]["endpoints"][0]["authorization"]["credentials"]["name"] in names_of(())


def test_checkov_finds_nothing_but_what_is_explained(build: Build, checkers: Path, tmp_path: Path):
    path = tmp_path / "objects.yaml"

    def found(objects: list[dict[str, Any]]) -> set[tuple[str, str]]:
        path.write_text(yaml.safe_dump_all(objects))
        command = [str(checkers / "checkov"), "-f", str(path), "--framework", "kubernetes", "--compact", "--quiet"]
        command += ["--skip-check", ",".join(SKIPPED), "--output", "json"]
        report = yaml.safe_load(subprocess.run(command, capture_output=True, text=True, check=False).stdout)
        assert report["summary"]["passed"] > 500
        failed = report["results"]["failed_checks"]
        return {(each["check_id"], each["resource"].rpartition(".")[2]) for each in failed}

    objects = build("base")
    assert found(objects) == KNOWN
    [router] = [pod for name, pod in pods(objects) if name == "router"]
    router["containers"][0]["securityContext"]["allowPrivilegeEscalation"] = True
    assert found(objects) - KNOWN == {("CKV_K8S_20", "router")}


def pods(objects: list[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    for each in objects:
        if each["kind"] in WORKLOADS:
            yield each["metadata"]["name"], each["spec"]["template"]["spec"]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_pods_are_confined(overlay: str, build: Build):
    """As the Pod Security Standard `restricted` says."""
    objects = build(overlay)
    (namespace,) = (each for each in objects if each["kind"] == "Namespace")

    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
    for name, pod in pods(objects):
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostNetwork", "hostIPC", "hostPID"} & set(pod)
        assert pod.get("automountServiceAccountToken") is not (name != "keys"), "only the job uses the API server"
        assert not any("hostPath" in volume for volume in pod["volumes"])
        for container in pod["containers"]:
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
            assert container["securityContext"]["allowPrivilegeEscalation"] is False
            assert container["securityContext"]["readOnlyRootFilesystem"] is True
            assert container["resources"]["limits"]["memory"]


def test_each_mounted_secret_is_one_that_the_job_makes_and_it_may_touch_no_other(objects: list[dict[str, Any]]):
    mounted = {v["secret"]["secretName"] for _, pod in pods(objects) for v in pod["volumes"] if "secret" in v}
    sets = [name for name, _ in groups(objects)]
    request = InitRequest(workers=tuple(f"{name}-0" for name in sets))
    made = set(names_of(request.workers))

    assert plan_files(request, ExistingFiles()).api_key
    assert mounted <= made | {"cloud-key"}
    assert {f"keys-{party.value}" for party in Party} <= made
    [role] = [each for each in objects if each["kind"] == "Role" and each["metadata"]["name"] == "keys"]
    create, touch = role["rules"]
    assert (create["verbs"], touch["verbs"]) == (["create"], ["get", "update"])
    assert set(touch["resourceNames"]) == made
    [job] = [pod for name, pod in pods(objects) if name == "keys"]
    for name, one in groups(objects):
        keys = re.search(rf" {name}:(\d+)[ ;]", job["containers"][0]["args"][0])
        assert keys
        assert int(keys[1]) >= one["spec"]["replicas"]


def groups(objects: list[dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    """The StatefulSets of workers."""
    return [
        (each["metadata"]["name"], each)
        for each in objects
        if each["kind"] == "StatefulSet" and each["metadata"]["labels"]["app.kubernetes.io/component"] == "worker"
    ]


def test_every_channel_can_be_used_and_nothing_else_can_be_reached(objects: list[dict[str, Any]]):
    """Channels go over NATS. Beside them clients reach routers and collector, and engines read KV from engines."""
    of_channels = {party.value for channel in CHANNELS.values() for party in (*channel.senders, *channel.receivers)}
    templates = {each["metadata"]["name"]: each["spec"]["template"] for each in objects if each["kind"] in WORKLOADS}
    component = {
        name: template["metadata"]["labels"]["app.kubernetes.io/component"] for name, template in templates.items()
    }
    policies = [each["spec"] for each in objects if each["kind"] == "NetworkPolicy"]
    stranger: Mapping[str, str] = {"app.kubernetes.io/name": "router", "app.kubernetes.io/component": "router"}

    def expected(source: str, target: str, port: str) -> bool:
        if source == "nats":  # It opens no connections.
            return False
        if target == "nats":
            return port == "client" and component.get(source) in of_channels
        if target in {"router", "collector"}:
            return port == "http"
        return component.get(source) == component[target] == "worker"

    assert of_channels == {party.value for party in Party} <= set(component.values()), "each party has pods"
    sources = {name: template["metadata"]["labels"] for name, template in templates.items()} | {"stranger": stranger}
    for source, labels in sources.items():
        for target, template in templates.items():
            [container] = template["spec"]["containers"]
            named = {port["name"]: port["containerPort"] for port in container.get("ports", ())}
            for port in [*named, "other"]:
                can = allows(policies, labels, template["metadata"]["labels"], port, named)
                assert can == expected(source, target, port), f"{source} to {target}, port {port}"


def test_grace_periods_are_longer_than_drains(objects: list[dict[str, Any]]):
    for name, pod in pods(objects):
        for container in pod["containers"]:
            env = {each["name"]: each.get("value", "") for each in container.get("env", ())}
            drains = [float(value) for key, value in env.items() if key.endswith("_DRAIN_S_MAX")]
            for drain_s in drains:
                assert pod["terminationGracePeriodSeconds"] >= drain_s + 15, name
            assert drains or name not in {"router", *(group for group, _ in groups(objects))}


def test_each_replicated_part_has_a_disruption_budget(objects: list[dict[str, Any]]):
    budgets = {
        each["spec"]["selector"]["matchLabels"]["app.kubernetes.io/name"]: each["spec"]["maxUnavailable"]
        for each in objects
        if each["kind"] == "PodDisruptionBudget"
    }

    assert budgets == dict.fromkeys(["router", "orchestrator", *(name for name, _ in groups(objects))], 1)


def test_the_chart_gives_workers_their_devices_and_places(render: Render):
    found = {name: one["spec"]["template"]["spec"] for name, one in groups(render(EVERYTHING))}

    prefill, decode = found["prefill"], found["decode"]
    assert prefill["containers"][0]["resources"]["limits"] == {
        "memory": "128Gi", "nvidia.com/gpu": "1", "rdma/hca": "1"
    }  # fmt: skip
    assert prefill["containers"][0]["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
    assert decode["containers"][0]["resources"]["limits"] == {"memory": "96Gi", "nvidia.com/gpu": "2"}
    assert decode["hostIPC"] is True
    assert "hostIPC" not in prefill
    assert decode["nodeSelector"] == {"gpu": "h200"}
    assert decode["tolerations"][0]["key"] == "nvidia.com/gpu"
    [near] = decode["affinity"]["podAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    assert near["podAffinityTerm"]["topologyKey"] == "topology.kubernetes.io/zone"
    env = {each["name"]: each.get("value") for each in decode["containers"][0]["env"]}
    assert (env["WORKER_TENSOR_PARALLEL_SIZE"], env["WORKER_LEGS_MAX"]) == ("2", "9")
    assert {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "8Gi"}} in decode["volumes"]
    assert found["cloud"]["containers"][0]["image"] == "baton-light:dev"
    assert "tolerations" not in found["store"]


def test_numbers_stay_what_they_are(render: Render):
    """Helm reads all of them as floats, and writes large ones with an exponent."""
    objects = render(EVERYTHING | {"router": {"drainSeconds": 1_000_000}})

    [settings] = [
        each["data"] for each in objects if each["kind"] == "ConfigMap" and each["metadata"]["name"] != "nats"
    ]
    assert (settings["WORKER_KV_CACHE_BYTES"], settings["ORCHESTRATOR_PLANNER_ITL_S"]) == ("2147483648", "0.04")
    [router] = [pod for name, pod in pods(objects) if name == "router"]
    env = {each["name"]: each["value"] for each in router["containers"][0]["env"]}
    assert (env["ROUTER_DRAIN_S_MAX"], env["ROUTER_LEAVE_S"]) == ("1000000", "5")


def test_the_planner_may_scale_what_it_is_told_to_scale_and_nothing_else(render: Render):
    objects = render(EVERYTHING)

    [orchestrator] = [pod for name, pod in pods(objects) if name == "orchestrator"]
    env = {each["name"]: each.get("value", "") for each in orchestrator["containers"][0]["env"]}
    assert env["ORCHESTRATOR_PLANNER"] == "act"
    assert read_stateful_sets(env["ORCHESTRATOR_STATEFUL_SETS"]) == {
        "prefill": StatefulSet(role=Role.PREFILL, model="Qwen/Qwen3-8B", replicas_max=16),
        "decode": StatefulSet(role=Role.DECODE, model="Qwen/Qwen3-8B", replicas_max=4),
    }
    assert orchestrator["serviceAccountName"] == "planner"
    [role] = [each for each in objects if each["kind"] == "Role" and each["metadata"]["name"] == "planner"]
    [rule] = role["rules"]
    assert rule == {
        "apiGroups": ["apps"],
        "resources": ["statefulsets/scale"],
        "resourceNames": ["decode", "prefill"],
        "verbs": ["get", "update"],
    }
    off = render({"workers": EVERYTHING["workers"]})
    assert {each["metadata"]["name"] for each in off if each["kind"] == "Role"} == {"keys"}


@pytest.mark.parametrize(
    ("planner", "replicas"), [(True, {"prefill": 5, "decode": 3}), (False, {"prefill": 2, "decode": 1})]
)
def test_an_upgrade_keeps_the_replicas_that_the_planner_has_chosen(
    planner: bool, replicas: dict[str, int], programs: dict[str, str], tmp_path: Path
):
    """Of other StatefulSets, and without a planner that acts, the values count."""
    values = EVERYTHING | {"orchestrator": {"planner": planner}, "collector": {}}
    (tmp_path / "values.yaml").write_text(yaml.safe_dump(values))
    with kubernetes_api(tmp_path / "account") as api:
        api.replicas = {"prefill": 5, "decode": 3, "store": 2, "cloud": 2}
        cluster = {"server": api.url, "certificate-authority": str(tmp_path / "account/ca.crt")}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "a", "cluster": cluster}],
            "users": [{"name": "a", "user": {"token": api.token}}],
            "contexts": [{"name": "a", "context": {"cluster": "a", "user": "a", "namespace": "baton"}}],
            "current-context": "a",
        }
        (tmp_path / "config").write_text(yaml.safe_dump(config))
        command = [
            programs["helm"],
            "template",
            "baton",
            str(CHART),
            "-f",
            str(tmp_path / "values.yaml"),
            "-n",
            "baton",
        ]
        command += ["--dry-run=server", "--disable-openapi-validation", "--kubeconfig", str(tmp_path / "config")]
        objects = objects_of(command)

    assert {name: one["spec"]["replicas"] for name, one in groups(objects)} == {**replicas, "store": 1, "cloud": 1}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"routers": {}}, "additional properties 'routers'"),
        ({"workers": {"decode": {"role": "decoder"}}}, "value must be one of"),
        ({"workers": {"router": {"role": "both"}}}, "invalid propertyName 'router'"),
        ({"workers": {"decode": {"role": "decode", "settings": {"WORKER_ROLE": "both"}}}}, "'WORKER_ROLE'"),
        ({"workers": {"decode": {"role": "decode", "replicas": 17}}}, "more than replicasMax"),
        ({"workers": {}}, "workers is empty"),
    ],
)
def test_wrong_values_are_refused(change: dict[str, Any], message: str, render: Render):
    with pytest.raises(AssertionError, match=message):
        render(deepcopy(change))


def test_the_base_is_what_the_chart_renders(programs: dict[str, str]):
    written = {path.name: path.read_text() for path in BASE.glob("*.yaml") if path.name not in BY_HAND}

    assert rendered(programs["helm"]) == written, "run python -m scripts.render_kubernetes"


def test_helm_finds_no_fault_in_the_chart(programs: dict[str, str], tmp_path: Path):
    values = tmp_path / "values.yaml"
    values.write_text(yaml.safe_dump(EVERYTHING))
    lint = [programs["helm"], "lint", "--strict", str(CHART), "-f", str(values)]

    done = subprocess.run(lint, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stdout + done.stderr


def test_the_fleet_file_of_the_documentation_becomes_what_it_says(render: Render, tmp_path: Path):
    text = (ROOT / "docs/kubernetes.md").read_text()
    [fleet] = re.findall(r"```toml\n(.*?)```", text, flags=re.DOTALL)
    [own] = [each for each in re.findall(r"```yaml\n(.*?)```", text, flags=re.DOTALL) if "kind:" not in each]
    (tmp_path / "fleet.toml").write_text(fleet)
    code, out, err = baton("init", str(tmp_path / "chart"), "--kubernetes", str(tmp_path / "fleet.toml"))
    assert code == 0, err
    assert re.sub(r"/\S*/chart", "chart", out.splitlines()[1].strip()) in text.replace(" -f own.yaml", "")
    values = yaml.safe_load((tmp_path / "chart/fleet.yaml").read_text())

    objects = render(values | yaml.safe_load(own), chart=tmp_path / "chart")

    found = {name: one["spec"] for name, one in groups(objects)}
    assert {name: one["replicas"] for name, one in found.items()} == {"prefill": 2, "decode": 6}
    for one in found.values():
        [container] = one["template"]["spec"]["containers"]
        assert container["image"] == "REGISTRY/baton-engine-cuda:1"
        assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"
        assert {"name": "cache", "persistentVolumeClaim": {"claimName": "models"}} in one["template"]["spec"]["volumes"]
    [settings] = [
        each["data"] for each in objects if each["kind"] == "ConfigMap" and each["metadata"]["name"] != "nats"
    ]
    assert json.loads(settings["ROUTER_SLOS"]) == {"default": {"ttft_s": 2, "itl_s": 0.1}}


def test_the_overlay_of_the_documentation_sets_what_it_says(build: Build, tmp_path: Path):
    [written] = [
        text
        for text in re.findall(r"```yaml\n(.*?)```", (ROOT / "docs/kubernetes.md").read_text(), flags=re.DOTALL)
        if "kind: Kustomization" in text
    ]
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
