"""Runs the pods of manifests as processes of this machine: no cluster runs where these tests run.

A mount is a folder: paths in commands, variables and configuration files are rewritten to it, and the one of a service
account is told to the process. Ports are free ones, and names of services are this machine. Everything else is as the
manifests say: commands, variables, Secrets, service accounts, probes, grace periods and their order.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from base64 import b64decode
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

import httpx

from services.launcher.system.machine import find_nats_server
from tests.support.kubernetes_api import KubernetesApi
from tests.support.nats_server import free_port
from tests.support.processes import ROOT

DEFAULT_GRACE_S = 30.0
PROBE_S_MAX = 30.0
Build = Callable[[str], list[dict[str, Any]]]
"""Returns the objects of an overlay."""


class Pod:
    """One replica."""

    def __init__(self, machine: Machine, owner: dict[str, Any], name: str) -> None:
        self.name = name
        self.root = machine.folder / name
        spec = owner["spec"]["template"]["spec"]
        (self.container,) = spec["containers"]
        self.account = spec.get("serviceAccountName", "")
        self.grace_s = float(spec.get("terminationGracePeriodSeconds", DEFAULT_GRACE_S))
        self._machine = machine
        self._volumes = {volume["name"]: volume for volume in spec.get("volumes", ())}
        for claim in owner["spec"].get("volumeClaimTemplates", ()):
            self._volumes[claim["metadata"]["name"]] = {"emptyDir": {}}
        self._mounts = {mount["mountPath"]: self._volumes[mount["name"]] for mount in self.container["volumeMounts"]}
        self.ports = {
            port["name"]: machine.port(name, port["containerPort"]) for port in self.container.get("ports", ())
        }
        self.env = self._environment()
        self.process: subprocess.Popen[bytes] | None = None
        self.log = machine.folder / f"{name}.log"

    def _text(self, text: str) -> str:
        """With the paths and ports of this machine."""
        mounts = "|".join(re.escape(path) for path in sorted(self._mounts, key=len, reverse=True))
        text = re.sub(
            rf"(?<![\w.]) ?({mounts})(?![\w-])",
            lambda found: found[0].replace(found[1], f"{self.root}{found[1]}"),
            text,
        )
        text = text.replace("baton_serve.", "")  # As the packages are named in a checkout.
        return text.replace("tls://nats:4222", f"tls://127.0.0.1:{self._machine.port('nats-0', 4222)}")

    def _environment(self) -> dict[str, str]:
        values: dict[str, str] = {}
        for source in self.container.get("envFrom", ()):
            config = self._machine.find("ConfigMap", source["configMapRef"]["name"])
            assert config or source["configMapRef"]["optional"]
            values |= config.get("data", {})
        for variable in self.container.get("env", ()):
            if "value" in variable:
                value = re.sub(r"\$\((\w+)\)", lambda found: values[found[1]], variable["value"])
            else:
                value = {"metadata.name": self.name, "metadata.namespace": "baton"}[
                    variable["valueFrom"]["fieldRef"]["fieldPath"]
                ]
            values[variable["name"]] = value
        for name, value in values.items():
            if name.endswith("_PORT"):
                values[name] = str(self._machine.port(self.name, int(value)))
            values[name] = self._text(values[name]).replace("0.0.0.0", "127.0.0.1")
        search = f"{Path(sys.executable).parent}:{Path(find_nats_server()).parent}:{os.environ['PATH']}"
        own = {"PATH": search, "HOME": f"{self.root}/home/baton", "PYTHONPATH": str(ROOT), **values}
        return own | self._machine.api_server(self.root) if self.account else own

    def start(self) -> None:
        for path, volume in self._mounts.items():
            folder = Path(f"{self.root}{path}")
            folder.mkdir(parents=True, exist_ok=True)
            for name, content in self._files(volume).items():
                (folder / name).write_bytes(content)
                (folder / name).chmod(0o600)
        command = [*self.container["command"], *self.container.get("args", ())]
        command = [sys.executable if each == "python" else self._text(each) for each in command]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(command, cwd=ROOT, env=self.env, stdout=log, stderr=log)

    def _files(self, volume: Mapping[str, Any]) -> dict[str, bytes]:
        if "secret" in volume:
            return {
                name: b64decode(data)
                for name, data in self._machine.secrets[volume["secret"]["secretName"]]["data"].items()
            }
        if "configMap" in volume:
            data = self._machine.find("ConfigMap", volume["configMap"]["name"])["data"]
            ports = {f"port: {port}": f"port: {self._machine.port(self.name, port)}" for port in (4222, 8222)}
            any_port = re.compile("|".join(ports))
            return {
                name: any_port.sub(lambda found: ports[found[0]], self._text(text)).encode()
                for name, text in data.items()
            }
        return {}

    def probe(self, kind: str) -> bool:
        """What the probe says now."""
        probe = self.container[kind]
        if "httpGet" in probe:
            port, path = self.ports[probe["httpGet"]["port"]], probe["httpGet"]["path"]
            try:
                return httpx.get(f"http://127.0.0.1:{port}{path}", timeout=PROBE_S_MAX, trust_env=False).is_success
            except httpx.HTTPError:
                return False
        try:
            return self.execute(probe["exec"]["command"]).returncode == 0
        except subprocess.TimeoutExpired:
            return False

    def execute(self, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        """A command in the container, as `kubectl exec` runs it."""
        return subprocess.run(
            [self._text(each) for each in command],
            cwd=ROOT, env=self.env, capture_output=True, text=True, timeout=PROBE_S_MAX, check=False,
        )  # fmt: skip

    def terminate(self) -> None:
        if self.process is not None:
            self.process.send_signal(signal.SIGTERM)

    def wait(self, s_max: float = 0.0) -> int:
        """The exit code, within the grace period, after which Kubernetes kills, or another time."""
        assert self.process is not None
        return self.process.wait(s_max or self.grace_s)

    @property
    def said(self) -> str:
        return self.log.read_text()[-4000:]


class Machine:
    """Where the pods run. Ends all of them at the end of its block."""

    def __init__(self, objects: list[dict[str, Any]], folder: Path, api: KubernetesApi, account: Path) -> None:
        """``account``: the folder of the service account at that API server."""
        self.folder = folder
        self.secrets = api.secrets
        self._api = api
        self._account = account
        self._objects = objects
        self._ports: dict[tuple[str, int], int] = {}
        self._pods: list[Pod] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for pod in self._pods:
            if pod.process is not None and pod.process.poll() is None:
                pod.process.kill()
                pod.process.wait()

    def port(self, pod: str, wanted: int) -> int:
        """The port of this machine that stands for a pod's."""
        return self._ports.setdefault((pod, wanted), free_port())

    def api_server(self, root: Path) -> dict[str, str]:
        """The environment of a pod with a service account."""
        server = urlsplit(self._api.url)
        root.mkdir(parents=True, exist_ok=True)
        (root / "sitecustomize.py").write_text(
            f"from pathlib import Path\nfrom shared import kubernetes\nkubernetes.ACCOUNT = Path({str(self._account)!r})\n"
        )
        return {
            "PYTHONPATH": f"{root}:{ROOT}",
            "KUBERNETES_SERVICE_HOST": str(server.hostname),
            "KUBERNETES_SERVICE_PORT_HTTPS": str(server.port),
        }

    def rules_of(self, account: str) -> list[dict[str, Any]]:
        """What a service account may do."""
        bound = (each for each in self._objects if each["kind"] == "RoleBinding")
        roles = [
            each["roleRef"]["name"] for each in bound if account in [subject["name"] for subject in each["subjects"]]
        ]
        return [rule for role in roles for rule in self.find("Role", role)["rules"]]

    def find(self, kind: str, name: str) -> dict[str, Any]:
        return next((each for each in self._objects if (each["kind"], each["metadata"]["name"]) == (kind, name)), {})

    def pod(self, kind: str, name: str, number: int = 0) -> Pod:
        """A replica, which is not started yet. Of a Deployment, each number is another pod."""
        pod = Pod(self, self.find(kind, name), name if kind == "Job" else f"{name}-{number}")
        self._pods.append(pod)
        return pod
