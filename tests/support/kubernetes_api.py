"""The part of Kubernetes' API that Baton uses, over HTTPS: Secrets, and the subresource `scale` of StatefulSets; and what
helm asks when it renders a chart for a cluster.

It refuses what Kubernetes refuses: a wrong token, what the rules of the account's Role do not permit, a Secret that is
no Secret, and a write over a newer version.
"""

from __future__ import annotations

import json
import re
import ssl
import threading
from base64 import b64decode
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from services.launcher.cluster.certificates import new_authority, new_server

NAMESPACE, TOKEN = "baton", "a-token-of-a-service-account"
PATH = re.compile(
    rf"(?:/api/v1|/apis/([a-z0-9.]+)/v1)/namespaces/{NAMESPACE}/([a-z]+)(?:/([a-z0-9.-]+))?(?:/([a-z]+))?"
)
VALID_KEY = re.compile(r"[-._a-zA-Z0-9]+")
VERBS = {"GET": "get", "POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}
KINDS = {
    "v1": ("ConfigMap", "Service", "ServiceAccount"),
    "apps/v1": ("Deployment", "StatefulSet"),
    "batch/v1": ("Job",),
    "networking.k8s.io/v1": ("NetworkPolicy",),
    "policy/v1": ("PodDisruptionBudget",),
    "rbac.authorization.k8s.io/v1": ("Role", "RoleBinding"),
}
OF_HELM = {
    "labels": {"app.kubernetes.io/managed-by": "Helm"},
    "annotations": {"meta.helm.sh/release-name": "baton", "meta.helm.sh/release-namespace": NAMESPACE},
}
EVERYTHING = ({"apiGroups": ["*"], "resources": ["*"], "verbs": ["*"]},)
Answer = tuple[int, dict[str, Any]]


class KubernetesApi:
    """What it has been told."""

    def __init__(self, rules: Sequence[dict[str, Any]]) -> None:
        self.rules = rules
        """Of the Role that the service account has."""
        self.secrets: dict[str, dict[str, Any]] = {}
        self.replicas: dict[str, int] = {}
        """Of each StatefulSet."""
        self.asked: list[str] = []
        """Methods and paths of the requests that change something."""
        self.meddles: list[int] = []
        """Numbers of replicas that another client writes, each just before a PUT."""
        self.token = TOKEN
        self.url = ""
        self._version = 1

    def files(self, secret: str) -> dict[str, bytes]:
        return {name: b64decode(data) for name, data in self.secrets[secret]["data"].items()}

    def answer(self, method: str, target: str, token: str, body: bytes) -> Answer:
        path = urlsplit(target).path
        if token != f"Bearer {self.token}":
            return 401, {"message": "Unauthorized"}
        if found := discovered(path):
            return 200, found
        matched = PATH.fullmatch(path)
        if matched is None:
            return 404, {"message": f"{path} not found"}
        group, resource, name, part = (each or "" for each in matched.groups())
        verb = "list" if method == "GET" and not name else VERBS[method]
        if not self._permits(group, f"{resource}/{part}" if part else resource, name, verb):
            return 403, {"message": f"cannot {verb} {resource} {name}".rstrip()}
        if method != "GET":
            self.asked.append(f"{method} {path}")
        given = json.loads(body) if body else {}
        if (group, resource, part) == ("", "secrets", ""):
            return self._secret(method, name, given)
        if (group, resource, part) == ("apps", "statefulsets", "scale"):
            return self._scale(method, name, given)
        if (resource, method, part) == ("statefulsets", "GET", "") and name in self.replicas:
            about = {"name": name, "namespace": NAMESPACE, **OF_HELM}
            spec = {"replicas": self.replicas[name]}
            return 200, {"kind": "StatefulSet", "apiVersion": "apps/v1", "metadata": about, "spec": spec}
        return 404, {"message": f"{path} not found"}

    def _permits(self, group: str, resource: str, name: str, verb: str) -> bool:
        return any(
            has(rule["apiGroups"], group)
            and has(rule["resources"], resource)
            and has(rule["verbs"], verb)
            # The name of what is created is in the body, which rules do not see.
            and (not rule.get("resourceNames") or (verb != "create" and name in rule["resourceNames"]))
            for rule in self.rules
        )

    def _secret(self, method: str, name: str, given: dict[str, Any]) -> Answer:
        if method == "GET":
            return (200, self.secrets[name]) if name in self.secrets else (404, {"message": f"{name} not found"})
        name = given["metadata"]["name"]
        if given["kind"] != "Secret" or not all(VALID_KEY.fullmatch(key) for key in given["data"]):
            return 422, {"message": "a key is invalid"}
        if (name in self.secrets) is (method == "POST"):
            return (409 if method == "POST" else 404), {"message": name}
        self.secrets[name] = given
        return 200, given

    def _scale(self, method: str, name: str, given: dict[str, Any]) -> Answer:
        if name not in self.replicas:
            return 404, {"message": f'statefulsets.apps "{name}" not found'}
        if method == "PUT":
            if self.meddles:
                self.replicas[name], self._version = self.meddles.pop(0), self._version + 1
            if given["kind"] != "Scale" or given["metadata"]["name"] != name:
                return 400, {"message": "no Scale"}
            if given["metadata"]["resourceVersion"] != str(self._version):
                return 409, {"message": "the object has been modified"}
            self.replicas[name], self._version = given["spec"]["replicas"], self._version + 1
        return 200, {
            "kind": "Scale",
            "apiVersion": "autoscaling/v1",
            "metadata": {"name": name, "namespace": NAMESPACE, "resourceVersion": str(self._version)},
            # Kubernetes leaves out a zero.
            "spec": {"replicas": self.replicas[name]} if self.replicas[name] else {},
            "status": {"replicas": self.replicas[name], "selector": f"app={name}"},
        }


def discovered(path: str) -> dict[str, Any] | None:
    """What the server says of itself; None for another path."""
    if path == "/version":
        return {"major": "1", "minor": "37", "gitVersion": "v1.37.0"}
    if path == "/api":
        return {"kind": "APIVersions", "versions": ["v1"]}
    if path == "/apis":
        versions = {each: {"groupVersion": each, "version": "v1"} for each in KINDS if "/" in each}
        groups = [
            {"name": each.partition("/")[0], "versions": [one], "preferredVersion": one}
            for each, one in versions.items()
        ]
        return {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}
    version = path.removeprefix("/apis/").removeprefix("/api/")
    if version not in KINDS:
        return None
    resources = [
        {"name": f"{kind.lower()}s", "singularName": kind.lower(), "namespaced": True, "kind": kind, "verbs": ["get"]}
        for kind in KINDS[version]
    ]
    return {"kind": "APIResourceList", "groupVersion": version, "resources": resources}


def has(allowed: Sequence[str], wanted: str) -> bool:
    return wanted in allowed or "*" in allowed


@contextmanager
def kubernetes_api(account: Path, rules: Sequence[dict[str, Any]] = EVERYTHING) -> Iterator[KubernetesApi]:
    """Serves until the end of the block; ``account`` is made the folder of a service account with these rules."""
    api = KubernetesApi(rules)

    class Handler(BaseHTTPRequestHandler):
        def handle_one_request(self) -> None:
            self.raw_requestline = self.rfile.readline(65537)
            if not self.raw_requestline or not self.parse_request():
                self.close_connection = True
                return
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            status, content = api.answer(self.command, self.path, self.headers.get("Authorization", ""), body)
            data = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None: ...

    account.mkdir(parents=True, exist_ok=True)
    now, address = datetime.now(UTC), "127.0.0.1"
    authority = new_authority([address], now)
    certificate = new_server(authority, [address], now)
    (account / "token").write_text(TOKEN + "\n")
    (account / "namespace").write_text(NAMESPACE)
    (account / "ca.crt").write_bytes(authority.certificate)
    own = account.with_name(f"{account.name}-server.pem")
    own.write_bytes(certificate.certificate + certificate.key)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(own)
    with ThreadingHTTPServer((address, 0), Handler) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        api.url = f"https://{address}:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield api
        finally:
            server.shutdown()
            thread.join()
