"""The part of Kubernetes' API that deals with Secrets, over HTTP."""

from __future__ import annotations

import json
import re
import threading
from base64 import b64decode
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

NAMESPACE, TOKEN = "baton", "a-token-of-a-service-account"
SECRET = re.compile(rf"/api/v1/namespaces/{NAMESPACE}/secrets(?:/([a-z0-9.-]+))?")
VALID_KEY = re.compile(r"[-._a-zA-Z0-9]+")


class SecretsApi:
    """What it has been told, by the name of the Secret. It refuses what Kubernetes refuses."""

    def __init__(self) -> None:
        self.secrets: dict[str, dict[str, Any]] = {}
        self.asked: list[str] = []
        """Methods and paths of the requests that change something."""
        self.forbids: set[str] = set()
        """Methods that the service account may not use."""
        self.page = 4
        """Items of one answer at most."""
        self.url = ""

    def files(self, secret: str) -> dict[str, bytes]:
        return {name: b64decode(data) for name, data in self.secrets[secret]["data"].items()}

    def answer(self, method: str, target: str, token: str, body: bytes) -> tuple[int, dict[str, Any]]:
        url = urlsplit(target)
        matched = SECRET.fullmatch(url.path)
        if token != f"Bearer {TOKEN}":
            return 401, {"message": "Unauthorized"}
        if matched is None or method in self.forbids:
            return 403, {"message": f"{method} {url.path} is forbidden"}
        if method == "GET":
            return 200, self._list(parse_qs(url.query))
        self.asked.append(f"{method} {url.path}")
        given = json.loads(body)
        name = given["metadata"]["name"]
        if not all(VALID_KEY.fullmatch(key) for key in given["data"]):
            return 422, {"message": "a key is invalid"}
        if (name in self.secrets) is (method == "POST"):
            return (409 if method == "POST" else 404), {"message": name}
        self.secrets[name] = given
        return 200, given

    def _list(self, query: dict[str, list[str]]) -> dict[str, Any]:
        wanted = dict(pair.split("=") for pair in query["labelSelector"][0].split(","))
        begin = int(query.get("continue", ["0"])[0])
        found = [each for each in self.secrets.values() if wanted.items() <= each["metadata"]["labels"].items()]
        end = begin + min(self.page, int(query["limit"][0]))
        return {"items": found[begin:end], "metadata": {"continue": str(end)} if end < len(found) else {}}


@contextmanager
def secrets_api(account: Path) -> Iterator[SecretsApi]:
    """Serves until the end of the block; ``account`` is made the folder of a service account that may use it."""
    api = SecretsApi()

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
    (account / "token").write_text(TOKEN + "\n")
    (account / "namespace").write_text(NAMESPACE)
    (account / "ca.crt").write_text("")
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        api.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield api
        finally:
            server.shutdown()
            thread.join()
