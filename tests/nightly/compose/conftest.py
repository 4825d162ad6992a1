"""A system of containers with simulated engines; skipped, with the reason, where docker cannot run it."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import yaml

ROOT = Path(__file__).parents[3]
UP_S_MAX = 900
READY_S_MAX = 60.0
POLL_S = 0.2
NATS_IMAGE = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]["nats"]["image"]
BASE_IMAGE = "python:3.11-slim-bookworm"


@dataclass
class Compose:
    """One compose project."""

    project: str
    environment: dict[str, str]

    def run(self, *arguments: str, timeout: float = 120) -> str:
        """`docker compose ...`; fails the test with what it said."""
        command = ["docker", "compose", "--project-name", self.project, *arguments]
        done = subprocess.run(
            command, cwd=ROOT, env=self.environment, capture_output=True, text=True, timeout=timeout, check=False
        )
        assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
        return done.stdout

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.environment['PORT']}"

    @property
    def metrics(self) -> str:
        return f"http://127.0.0.1:{self.environment['COLLECTOR_PORT']}/metrics"


def said_by(*command: str, timeout: float = 300) -> tuple[bool, str]:
    """Whether the command succeeded, and the last line it said."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return False, str(error)
    lines = (done.stdout + done.stderr).strip().splitlines()
    return done.returncode == 0, lines[-1] if lines else ""


@pytest.fixture(scope="session")
def compose_client() -> None:
    """`docker compose` is installed; no daemon is needed."""
    if shutil.which("docker") is None:
        pytest.skip("no docker client is installed")
    there, said = said_by("docker", "compose", "version")
    if not there:
        pytest.skip(f"docker has no compose plugin: {said}")


@pytest.fixture(scope="session")
def docker(compose_client: None) -> None:
    """A daemon answers, and the images that are not ours can be had."""
    running, said = said_by("docker", "version")
    if not running:
        pytest.skip(f"no docker daemon can be used: {said}")
    for image in (os.environ.get("BASE_IMAGE", BASE_IMAGE), NATS_IMAGE):
        if not said_by("docker", "image", "inspect", image)[0]:
            pulled, said = said_by("docker", "pull", "--quiet", image, timeout=UP_S_MAX)
            if not pulled:
                pytest.skip(f"the image {image} is not here and cannot be pulled: {said}")


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


@pytest.fixture(scope="module")
def system(docker: None) -> Iterator[Compose]:
    """NATS, the light services, one prefill and two decode workers with simulated engines."""
    ports = {"PORT": free_port(), "COLLECTOR_PORT": free_port()}
    environment = {**os.environ, **ports, "COMPOSE_PROFILES": "simulated"}
    compose = Compose(f"baton-test-{os.getpid()}", environment)
    try:
        compose.run("up", "--detach", "--build", "--wait", "--scale", "sim-decode=2", timeout=UP_S_MAX)
        wait_until_ready(compose)
        yield compose
    except BaseException:
        print(compose.run("logs", "--no-color", "--tail", "40"))
        raise
    finally:
        compose.run("down", "--volumes", "--remove-orphans", "--timeout", "20")


def wait_until_ready(compose: Compose) -> None:
    """The router sees a fleet that can serve."""
    deadline = time.monotonic() + READY_S_MAX
    with httpx.Client(base_url=compose.endpoint, transport=httpx.HTTPTransport(retries=5)) as client:
        while (answer := client.get("/ready")).status_code != httpx.codes.OK:
            assert time.monotonic() < deadline, f"the router is not ready: {answer.text}"
            time.sleep(POLL_S)
