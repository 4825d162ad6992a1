"""Systems of containers; skipped, with the reason, where docker cannot run them."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass

import httpx
import pytest
import yaml

from tests.nightly.compose.own_docker import BUILD_S_MAX, CannotRun, add_compose, own_docker, run
from tests.support.nats_server import free_port
from tests.support.processes import ROOT

UP_S_MAX = 1800
"""With the build of the light image, on a busy machine."""
READY_S_MAX = 120.0
POLL_S = 0.2
DECODERS = 2
SERVICES = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
BASE_IMAGE = "python:3.11-slim-bookworm"


@dataclass
class Compose:
    """One compose project."""

    project: str
    environment: dict[str, str]

    def run(self, *arguments: str, timeout: float = 600, **settings: str) -> str:
        """`docker compose ...`, with further settings; fails the test with what it said."""
        done = self.attempt(*arguments, timeout=timeout, **settings)
        assert done.returncode == 0, f"{arguments}\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
        return done.stdout

    def attempt(self, *arguments: str, timeout: float = 600, **settings: str) -> subprocess.CompletedProcess[str]:
        """`docker compose ...`, whatever its exit status."""
        command = ["docker", "compose", "--env-file", os.devnull, "--project-name", self.project, *arguments]
        environment = {**self.environment, **settings}
        return subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout, check=False
        )

    def docker(self, *arguments: str) -> str:
        """`docker ...`."""
        done = subprocess.run(
            ["docker", *arguments], env=self.environment, capture_output=True, text=True, timeout=600, check=False
        )
        assert done.returncode == 0, f"{arguments}\n{done.stderr}"
        return done.stdout

    def up(self, *options: str, **settings: str) -> None:
        """Start what does not run, and wait until the router sees a fleet that can serve."""
        scale = f"sim-decode={DECODERS}"
        self.run("up", "--detach", "--wait", "--scale", scale, *options, timeout=UP_S_MAX, **settings)
        wait_until_ready(self)

    def containers(self) -> list[str]:
        """The full ids of all containers, also of those that have ended."""
        label = f"label=com.docker.compose.project={self.project}"
        return sorted(self.docker("ps", "--all", "--quiet", "--no-trunc", "--filter", label).split())

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.environment['PORT']}"

    @property
    def metrics(self) -> str:
        return f"http://127.0.0.1:{self.environment['COLLECTOR_PORT']}/metrics"


@pytest.fixture(scope="session")
def compose_client(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment in which `docker compose` works; no daemon is needed."""
    environment = dict(os.environ)
    try:
        run(["docker", "compose", "version"])
    except CannotRun:
        try:
            environment = add_compose(tmp_path_factory.mktemp("compose"))
            run(["docker", "compose", "version"], environment)
        except CannotRun as reason:
            pytest.skip(str(reason))
    return environment


@pytest.fixture(scope="session")
def docker(compose_client: dict[str, str]) -> Iterator[dict[str, str]]:
    """The environment in which a daemon answers that has the images that are not ours, or can pull them."""
    images = {"python": os.environ.get("BASE_IMAGE", BASE_IMAGE), "nats": SERVICES["nats"]["image"]}
    try:
        run(["docker", "version"], compose_client)
    except CannotRun:
        if shutil.which("prometheus"):
            images["prometheus"] = SERVICES["prometheus"]["image"]
        try:
            with own_docker(compose_client, images) as environment:
                yield environment
        except CannotRun as reason:
            pytest.skip(str(reason))
        return
    for image in images.values():
        if why := why_missing(image, compose_client):
            pytest.skip(why)
    yield compose_client


def why_missing(image: str, environment: dict[str, str]) -> str:
    """Empty if the image is here afterwards."""
    try:
        run(["sh", "-c", 'docker image inspect "$0" || docker pull --quiet "$0"', image], environment, BUILD_S_MAX)
    except CannotRun as reason:
        return f"the image {image} is not here and cannot be pulled: {reason}"
    return ""


@contextlib.contextmanager
def running(docker: dict[str, str], profiles: str, **more: str) -> Iterator[Compose]:
    """A project of its own, which nothing of is left, nor of its images."""
    ports = {"PORT": str(free_port()), "COLLECTOR_PORT": str(free_port())}
    settings = {"COMPOSE_PROFILES": profiles, "BATON_TAG": "test", **more}
    compose = Compose(f"baton-test-{os.getpid()}", {**docker, **ports, **settings})
    try:
        yield compose
    except BaseException:
        print(compose.run("logs", "--no-color", "--tail", "40"))
        raise
    finally:
        compose.run("--profile", "*", "down", "--volumes", "--timeout", "20", COMPOSE_PROFILES="")
        left = compose.containers()
        images = [f"baton-{name}:test" for name in ("light", "engine-cpu")]
        subprocess.run(["docker", "image", "rm", *images], env=compose.environment, capture_output=True, check=False)
    assert not left, "down with all profiles left containers"


@pytest.fixture(scope="module")
def system(docker: dict[str, str]) -> Iterator[Compose]:
    """NATS, the light services, one prefill and two decode workers with simulated engines."""
    with running(docker, "simulated") as compose:
        compose.up("--build")
        yield compose


def wait_until_ready(compose: Compose) -> None:
    """The router sees a fleet that can serve."""
    deadline = time.monotonic() + READY_S_MAX
    with httpx.Client(base_url=compose.endpoint, transport=httpx.HTTPTransport(retries=5)) as client:
        while (answer := client.get("/ready")).status_code != httpx.codes.OK:
            assert time.monotonic() < deadline, f"the router is not ready: {answer.text}"
            time.sleep(POLL_S)
