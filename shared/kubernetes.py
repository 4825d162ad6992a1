"""The API server of Kubernetes, as a pod reaches it with its service account."""

from __future__ import annotations

import os
import ssl
from pathlib import Path

from shared.addresses import url_of

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Where Kubernetes puts a pod's token, the CA of its API server and the pod's namespace."""


class NoAccount(Exception):
    """The process is in no pod with a service account; the message says what is missing."""


class ServiceAccount:
    """Reads the files that Kubernetes puts into the pod. Raises NoAccount."""

    def __init__(self, folder: Path | None = None, server: str = "") -> None:
        """``folder``: ``ACCOUNT`` if not given. ``server``: the URL of the API server; empty: the one that Kubernetes
        names in the environment.
        """
        self._folder = folder or ACCOUNT
        try:
            self.namespace = self._read("namespace")
            self.server = server or url_of(
                "https", os.environ["KUBERNETES_SERVICE_HOST"], int(os.environ["KUBERNETES_SERVICE_PORT_HTTPS"])
            )
        except (KeyError, ValueError) as error:
            raise NoAccount(f"the environment does not name the API server: {error}") from error

    @property
    def headers(self) -> dict[str, str]:
        """With the token, which Kubernetes replaces within the hour."""
        return {"Authorization": f"Bearer {self._read('token')}"}

    def trust(self) -> ssl.SSLContext:
        """Accepts the API server's certificate only if the cluster's CA has signed it."""
        try:
            return ssl.create_default_context(cafile=str(self._folder / "ca.crt"))
        except OSError as error:
            raise NoAccount(f"{self._folder / 'ca.crt'}: {error.strerror or error}") from error

    def _read(self, name: str) -> str:
        try:
            return (self._folder / name).read_text().strip()
        except OSError as error:
            raise NoAccount(f"{self._folder / name}: {error.strerror}") from error
