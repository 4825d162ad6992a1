"""A cluster's keys as Secrets of Kubernetes, written by a pod with its service account.

The Secret ``keys-router`` has the files of the folder ``router``, and so on. Keys of single workers are together in one
Secret for each StatefulSet, because all its pods mount the same one: ``keys-workers-prefill`` has the file
``prefill-0.nkey``. Clients' API keys are in ``api-keys``. The first of them, as clients send it, is in ``admin-key``,
and the one with which Prometheus reads metrics in ``metrics-key``.
"""

from __future__ import annotations

import re
from base64 import b64decode, b64encode
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import httpx

from services.launcher.cluster.api_keys import CannotAdd, add_entry
from services.launcher.cluster.folder import API_KEYS, AUTHORITY, NKEY, SERVER, TRUSTED, CannotCreate, folder_of
from shared.contracts.api_keys import Key, Permission, digest_of, new_key
from shared.contracts.channels import Party
from shared.contracts.permissions import owner_of
from shared.kubernetes import NoAccount, ServiceAccount

LABELS = {"app.kubernetes.io/part-of": "baton", "app.kubernetes.io/component": "keys"}
KEYS, WORKERS = "keys-", "keys-workers-"
API_KEYS_SECRET, ADMIN_SECRET, METRICS_SECRET = "api-keys", "admin-key", "metrics-key"
WORKER_FILE = re.compile(r"worker-(([^/]+)-[0-9]+)/nkey")
ANSWER_S_MAX = 30.0
NOT_FOUND = 404
METRICS = "metrics"
"""Tenant of the key that reads metrics."""


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


def names_of(workers: Iterable[str]) -> list[str]:
    """All Secrets of a cluster with these workers. A service account needs access to no others."""
    files = [AUTHORITY, SERVER, *(f"{folder_of(owner_of(party))}/{NKEY}" for party in Party)]
    files += [f"{folder_of(owner_of(Party.WORKER, worker))}/{NKEY}" for worker in workers]
    return [*dict.fromkeys(place_of(file)[0] for file in files), API_KEYS_SECRET, ADMIN_SECRET, METRICS_SECRET]


class Secrets:
    """The Secrets of the pod's namespace. Every method raises CannotCreate, which says what the API server refuses."""

    def __init__(self, workers: Iterable[str], account: ServiceAccount | None = None) -> None:
        """``account``: the pod's, if not given."""
        self._names = names_of(workers)
        try:
            account = account or ServiceAccount()
            self._http = httpx.Client(
                base_url=f"{account.server}/api/v1/namespaces/{account.namespace}",
                headers=account.headers,
                verify=account.trust(),
                timeout=ANSWER_S_MAX,
                trust_env=False,
            )
        except NoAccount as error:
            raise CannotCreate(
                f"--secrets is for a pod with a service account that may write Secrets, as the job `keys` has: {error}"
            ) from error
        self._existing = {name: found for name in self._names if (found := self._read(name)) is not None}

    def restore(self, folder: Path) -> None:
        """Write the files of existing Secrets to the folder."""
        for secret, content in self._existing.items():
            for name, data in content.items():
                if file := file_of(secret, name):
                    path = folder / file
                    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                    path.write_bytes(data)
                    path.chmod(0o600)

    def store(self, folder: Path, api_key: str) -> list[str]:
        """Create or replace each Secret whose content has changed; returns their names. ``api_key``: empty if old."""
        shown = {ADMIN_SECRET: {"key": api_key.encode()}} if api_key else {}
        if METRICS_SECRET not in self._existing and (folder / API_KEYS).exists():
            shown[METRICS_SECRET] = {"key": _metrics_key(folder / API_KEYS).encode()}
        wanted = secrets_of(read_folder(folder)) | shown
        changed = [name for name, content in sorted(wanted.items()) if self._existing.get(name) != content]
        for name in changed:
            body = {
                "apiVersion": "v1",
                "kind": "Secret",
                "metadata": {"name": name, "labels": LABELS},
                "data": {key: b64encode(data).decode() for key, data in wanted[name].items()},
            }
            if name in self._existing:
                self._ask("PUT", f"/secrets/{name}", json=body)
            else:
                self._ask("POST", "/secrets", json=body)
            self._existing[name] = wanted[name]
        return changed

    def _read(self, name: str) -> dict[str, bytes] | None:
        response = self._sent("GET", f"/secrets/{name}")
        if response.status_code == NOT_FOUND:
            return None
        data: Mapping[str, str] = self._accepted(response).json().get("data") or {}
        return {key: b64decode(text) for key, text in data.items()}

    def _ask(self, method: str, path: str, **arguments: Any) -> None:
        self._accepted(self._sent(method, path, **arguments))

    def _sent(self, method: str, path: str, **arguments: Any) -> httpx.Response:
        try:
            return self._http.request(method, path, **arguments)
        except httpx.HTTPError as error:
            raise CannotCreate(f"The API server of Kubernetes does not answer: {error}") from error

    def _accepted(self, response: httpx.Response) -> httpx.Response:
        if response.is_error:
            asked = f"{response.request.method} {response.request.url.path}"
            raise CannotCreate(
                f"The API server of Kubernetes refuses {asked}: {response.status_code} {response.text[:300]}"
            )
        return response


def _metrics_key(file: Path) -> str:
    """A new key in the file that may read metrics. Raises CannotCreate."""
    key = new_key()
    entry = Key(tenant=METRICS, sha256=digest_of(key), note="baton init", permissions=frozenset({Permission.VIEW}))
    try:
        add_entry(file, entry)
    except CannotAdd as error:
        raise CannotCreate(f"the Secret {API_KEYS_SECRET}: {error}") from error
    return key
