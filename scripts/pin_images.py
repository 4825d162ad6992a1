"""Pins the images of compose.yaml by digest: ``python -m scripts.pin_images [FILE ...]``.

A tag can be given to another image at any time; a digest cannot. For each image the registry is asked for the digest of
its tag, and ``name:tag`` becomes ``name:tag@sha256:...``. Run it again after changing a tag, or with ``--renew`` to get
the present image of every tag. ``BATON_REGISTRY`` names a mirror to ask instead of the registry in the image's name.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import httpx

ROOT = Path(__file__).resolve().parents[1]
HUB, HUB_API = "docker.io", "https://registry-1.docker.io"
ASK_S_MAX = 20.0
MANIFESTS = (
    "application/vnd.oci.image.index.v1+json, application/vnd.docker.distribution.manifest.list.v2+json, "
    "application/vnd.oci.image.manifest.v1+json, application/vnd.docker.distribution.manifest.v2+json"
)
IMAGE = re.compile(
    r"(?P<before>^\s*image: |BASE_IMAGE:-)(?P<name>[a-z0-9][\w./-]*):(?P<tag>[\w][\w.-]*)"
    r"(?P<digest>@sha256:[0-9a-f]{64})?",
    re.MULTILINE,
)
"""With a tag that is no variable: images that compose builds have one."""
DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
CHALLENGE = re.compile(r'(\w+)="([^"]*)"')


class NoDigest(Exception):
    """The registry gave none; the message says why."""


@dataclass(frozen=True)
class Registry:
    """Answers which digest a tag has (OCI distribution specification)."""

    client: httpx.Client
    mirror: str = ""
    """Base URL; empty: the registry in the image's name."""

    def digest(self, name: str, tag: str) -> str:
        """Raises NoDigest."""
        api, path = locate(name)
        url = f"{self.mirror.rstrip('/') or api}/v2/{path}/manifests/{tag}"
        try:
            found = self._ask(url, {})
            if found.status_code == httpx.codes.UNAUTHORIZED:
                found = self._ask(url, self._token(found))
        except httpx.HTTPError as error:
            raise NoDigest(f"{url} cannot be reached: {error or type(error).__name__}") from error
        digest = str(found.headers.get("docker-content-digest", ""))
        if found.status_code != httpx.codes.OK or not DIGEST.fullmatch(digest):
            raise NoDigest(f"{url} replied {found.status_code} and no digest")
        return digest

    def _ask(self, url: str, headers: dict[str, str]) -> httpx.Response:
        return self.client.head(url, headers={"accept": MANIFESTS, **headers})

    def _token(self, refused: httpx.Response) -> dict[str, str]:
        """Registries give anybody a token for public images."""
        fields = dict(CHALLENGE.findall(refused.headers.get("www-authenticate", "")))
        realm = fields.pop("realm", "")
        if not realm:
            return {}
        reply = self.client.get(realm, params=fields)
        try:
            given = reply.json()
            return {"authorization": f"Bearer {given.get('token') or given.get('access_token')}"}
        except (ValueError, AttributeError) as error:
            raise NoDigest(f"{realm} replied {reply.status_code} and no token") from error


def locate(name: str) -> tuple[str, str]:
    """Base URL of the registry, and the image's path there."""
    host, slash, rest = name.partition("/")
    if slash and ("." in host or ":" in host or host == "localhost") and host != HUB:
        return f"https://{host}", rest
    path = rest if host == HUB else name
    return HUB_API, path if "/" in path else f"library/{path}"


def pin(text: str, registry: Registry, *, renew: bool) -> tuple[str, list[str]]:
    """The text with digests, and what was pinned. Raises NoDigest."""
    pinned: list[str] = []

    def replace(found: re.Match[str]) -> str:
        if found["digest"] and not renew:
            return found[0]
        digest = registry.digest(found["name"], found["tag"])
        pinned.append(f"{found['name']}:{found['tag']}@{digest}")
        return f"{found['before']}{pinned[-1]}"

    return IMAGE.sub(replace, text), pinned


def main(arguments: list[str]) -> int:
    """Pin the images in the files; writes nothing when a digest cannot be found out."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", nargs="*", type=Path, default=[ROOT / "compose.yaml", ROOT / "compose/cuda.yaml"])
    parser.add_argument("--renew", action="store_true", help="also images that have a digest")
    options = parser.parse_args(arguments)
    with httpx.Client(timeout=ASK_S_MAX, follow_redirects=True) as client:
        registry = Registry(client, os.environ.get("BATON_REGISTRY", ""))
        try:
            results = {file: pin(file.read_text(), registry, renew=options.renew) for file in options.files}
        except NoDigest as error:
            sys.stderr.write(
                f"Nothing was changed: {error}. The digests must be asked for where a registry can be reached; "
                "BATON_REGISTRY=URL names a mirror.\n"
            )
            return 1
    for file, (text, pinned) in results.items():
        file.write_text(text)
        for image in pinned:
            print(image)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
