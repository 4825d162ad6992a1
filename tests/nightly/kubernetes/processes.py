"""Runs the pods of manifests as processes of this machine: no cluster runs where these tests run.

A mount is a folder: paths in commands, variables and configuration files are rewritten to it. Ports are free ones, and
names of services are this machine. Everything else is as the manifests say: commands, variables, Secrets, probes and
their order.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from base64 import b64decode
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

import httpx

from services.launcher.system.machine import find_nats_server
from tests.support.nats_server import free_port
from tests.support.processes import ROOT

END_S_MAX = 90.0
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
        return {"PATH": search, "HOME": f"{self.root}/home/baton", "PYTHONPATH": str(ROOT), **values}

    def start(self, programs: Path | None = None) -> None:
        """``programs``: a folder whose programs come before others."""
        for path, volume in self._mounts.items():
            folder = Path(f"{self.root}{path}")
            folder.mkdir(parents=True, exist_ok=True)
            for name, content in self._files(volume).items():
                (folder / name).write_bytes(content)
                (folder / name).chmod(0o600)
        command = [*self.container["command"], *self.container.get("args", ())]
        command = [sys.executable if each == "python" else self._text(each) for each in command]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command,
                cwd=ROOT,
                env={**self.env, **({"PATH": f"{programs}:{self.env['PATH']}"} if programs else {})},
                stdout=log,
                stderr=log,
            )

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
        command = [self._text(each) for each in probe["exec"]["command"]]
        done = subprocess.run(command, cwd=ROOT, env=self.env, capture_output=True, timeout=PROBE_S_MAX, check=False)
        return done.returncode == 0

    def terminate(self) -> None:
        if self.process is not None:
            self.process.send_signal(signal.SIGTERM)

    def wait(self) -> int:
        assert self.process is not None
        return self.process.wait(END_S_MAX)

    @property
    def said(self) -> str:
        return self.log.read_text()[-4000:]


class Machine:
    """Where the pods run. Ends all of them at the end of its block."""

    def __init__(self, objects: list[dict[str, Any]], folder: Path, secrets: dict[str, dict[str, Any]]) -> None:
        self.folder = folder
        self.secrets = secrets
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

    def find(self, kind: str, name: str) -> dict[str, Any]:
        return next((each for each in self._objects if (each["kind"], each["metadata"]["name"]) == (kind, name)), {})

    def pod(self, kind: str, name: str, number: int = 0) -> Pod:
        """A replica, which is not started yet."""
        pod = Pod(self, self.find(kind, name), name if kind == "Job" else f"{name}-{number}")
        self._pods.append(pod)
        return pod
