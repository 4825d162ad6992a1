"""A system of containers with simulated engines; skipped, with the reason, where docker cannot run it."""

from __future__ import annotations

import os
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
NATS_IMAGE = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]["nats"]["image"]
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
    images = {"python": os.environ.get("BASE_IMAGE", BASE_IMAGE), "nats": NATS_IMAGE}
    try:
        run(["docker", "version"], compose_client)
    except CannotRun:
        try:
            with own_docker(compose_client, images) as environment:
                yield environment
        except CannotRun as reason:
            pytest.skip(str(reason))
        return
    for image in images.values():
        try:
            run(
                ["sh", "-c", 'docker image inspect "$0" || docker pull --quiet "$0"', image],
                compose_client,
                BUILD_S_MAX,
            )
        except CannotRun as reason:
            pytest.skip(f"the image {image} is not here and cannot be pulled: {reason}")
    yield compose_client


@pytest.fixture(scope="module")
def system(docker: dict[str, str]) -> Iterator[Compose]:
    """NATS, the light services, one prefill and two decode workers with simulated engines."""
    ports = {"PORT": str(free_port()), "COLLECTOR_PORT": str(free_port())}
    settings = {"COMPOSE_PROFILES": "simulated", "BATON_TAG": "test"}
    compose = Compose(f"baton-test-{os.getpid()}", {**docker, **ports, **settings})
    try:
        compose.up("--build")
        yield compose
    except BaseException:
        print(compose.run("logs", "--no-color", "--tail", "40"))
        raise
    finally:
        compose.run("--profile", "*", "down", "--volumes", "--timeout", "20", COMPOSE_PROFILES="")
        left = compose.containers()
        subprocess.run(
            ["docker", "image", "rm", "baton-light:test"], env=compose.environment, capture_output=True, check=False
        )
    assert not left, "down with all profiles left containers"


def wait_until_ready(compose: Compose) -> None:
    """The router sees a fleet that can serve."""
    deadline = time.monotonic() + READY_S_MAX
    with httpx.Client(base_url=compose.endpoint, transport=httpx.HTTPTransport(retries=5)) as client:
        while (answer := client.get("/ready")).status_code != httpx.codes.OK:
            assert time.monotonic() < deadline, f"the router is not ready: {answer.text}"
            time.sleep(POLL_S)
