"""A cluster's keys as Secrets of Kubernetes, written by a pod with its service account.

The Secret ``keys-router`` has the files of the folder ``router``, and so on. Keys of single workers are together in one
Secret for each role, because all pods of a StatefulSet mount the same one: ``keys-workers-prefill`` has the file
``prefill-0.nkey``. Clients' API keys are in ``api-keys``, and the first of them, as clients send it, in ``admin-key``.
"""

from __future__ import annotations

import os
import re
from base64 import b64decode, b64encode
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import httpx

from services.launcher.cluster.folder import API_KEYS, NKEY, TRUSTED, CannotCreate
from shared.addresses import url_of

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Where Kubernetes puts a pod's token, the CA of its API server and the pod's namespace."""
LABELS = {"app.kubernetes.io/part-of": "baton", "app.kubernetes.io/component": "keys"}
KEYS, WORKERS = "keys-", "keys-workers-"
API_KEYS_SECRET, ADMIN_SECRET = "api-keys", "admin-key"
WORKER_FILE = re.compile(r"worker-(([^/]+)-[0-9]+)/nkey")
ANSWER_S_MAX = 30.0
PAGE = 500


def place_of(file: str) -> tuple[str, str]:
    """The Secret that has this file of the folder, and the name there."""
    if file == API_KEYS:
        return API_KEYS_SECRET, Path(file).name
    if worker := WORKER_FILE.fullmatch(file):
        return f"{WORKERS}{worker[2]}", f"{worker[1]}.{NKEY}"
    folder, name = file.split("/", maxsplit=1)
    return f"{KEYS}{folder}", name


def file_of(secret: str, name: str) -> str:
    """The inverse of ``place_of``; empty for what is no file of the folder."""
    if (secret, name) == (API_KEYS_SECRET, Path(API_KEYS).name):
        return API_KEYS
    if secret.startswith(WORKERS):
        return f"worker-{name.removesuffix(f'.{NKEY}')}/{NKEY}" if name.endswith(f".{NKEY}") else ""
    return f"{secret.removeprefix(KEYS)}/{name}" if secret.startswith(KEYS) else ""


def secrets_of(files: Mapping[str, bytes]) -> dict[str, dict[str, bytes]]:
    """The content of each Secret. One with workers' keys has the CA certificate that all of them trust, too."""
    secrets: dict[str, dict[str, bytes]] = {}
    for file, content in files.items():
        if file.startswith("worker-") and not file.endswith(f"/{NKEY}"):
            continue
        secret, name = place_of(file)
        secrets.setdefault(secret, {})[name] = content
        if secret.startswith(WORKERS):
            secrets[secret][TRUSTED] = files[f"{file.removesuffix(NKEY)}{TRUSTED}"]
    return secrets


def read_folder(folder: Path) -> dict[str, bytes]:
    """All files, by their path in the folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.glob("*/*") if path.is_file()}


class Secrets:
    """The Secrets of the pod's namespace. Every method raises CannotCreate, which says what the API server refuses."""

    def __init__(self, account: Path = ACCOUNT, server: str = "") -> None:
        try:
            self._namespace = (account / "namespace").read_text().strip()
            token = (account / "token").read_text().strip()
            host = server or _server(os.environ)
            self._http = httpx.Client(
                base_url=f"{host}/api/v1/namespaces/{self._namespace}",
                headers={"Authorization": f"Bearer {token}"},
                verify=str(account / "ca.crt") if host.startswith("https") else True,
                timeout=ANSWER_S_MAX,
                trust_env=False,
            )
        except (OSError, KeyError) as error:
            raise CannotCreate(
                "--kubernetes is for a pod with a service account that may write Secrets, as the job `keys` of "
                f"kubernetes/base has: {error}"
            ) from error

    def restore(self, folder: Path) -> None:
        """Write the files of existing Secrets to the folder."""
        for secret, content in self._existing().items():
            for name, data in content.items():
                if file := file_of(secret, name):
                    path = folder / file
                    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                    path.write_bytes(data)
                    path.chmod(0o600)

    def store(self, folder: Path, api_key: str) -> list[str]:
        """Create or replace each Secret whose content has changed; returns their names. ``api_key``: empty if old."""
        wanted = secrets_of(read_folder(folder)) | ({ADMIN_SECRET: {"key": api_key.encode()}} if api_key else {})
        existing = self._existing()
        changed = [name for name, content in sorted(wanted.items()) if existing.get(name) != content]
        for name in changed:
            body = {
                "apiVersion": "v1",
                "kind": "Secret",
                "metadata": {"name": name, "labels": LABELS},
                "data": {key: b64encode(data).decode() for key, data in wanted[name].items()},
            }
            if name in existing:
                self._ask("PUT", f"/secrets/{name}", json=body)
            else:
                self._ask("POST", "/secrets", json=body)
        return changed

    def _existing(self) -> dict[str, dict[str, bytes]]:
        items: list[dict[str, Any]] = []
        after = ""
        while not items or after:
            selector = ",".join(f"{name}={value}" for name, value in LABELS.items())
            page = self._ask("GET", "/secrets", params={"labelSelector": selector, "limit": PAGE, "continue": after})
            items += page["items"]
            after = page.get("metadata", {}).get("continue", "")
            if not items:
                break
        return {item["metadata"]["name"]: dict(_decoded(item.get("data") or {})) for item in items}

    def _ask(self, method: str, path: str, **arguments: Any) -> dict[str, Any]:
        try:
            response = self._http.request(method, path, **arguments)
        except httpx.HTTPError as error:
            raise CannotCreate(f"The API server of Kubernetes does not answer: {error}") from error
        if response.is_error:
            raise CannotCreate(
                f"The API server of Kubernetes refuses {method} {path} in the namespace {self._namespace}: "
                f"{response.status_code} {response.text[:300]}"
            )
        answer: dict[str, Any] = response.json()
        return answer


def _server(environ: Mapping[str, str]) -> str:
    return url_of("https", environ["KUBERNETES_SERVICE_HOST"], int(environ["KUBERNETES_SERVICE_PORT_HTTPS"]))


def _decoded(data: Mapping[str, str]) -> Iterable[tuple[str, bytes]]:
    return ((name, b64decode(text)) for name, text in data.items())
