"""The manifests of simulated engines, run as processes: keys, NATS, services, workers, a request, and a rollout."""

from __future__ import annotations

import sys
from pathlib import Path

import httpx
import pytest

from tests.nightly.kubernetes.processes import Build, Machine, Pod
from tests.support.secrets_api import secrets_api
from tests.support.system import until

pytestmark = [pytest.mark.nats, pytest.mark.timeout(600)]

READY_S_MAX = 180.0
PROMPT = list(range(100))


def with_account(programs: Path, account: Path, api: str) -> Path:
    """A `baton` that finds the service account, and the API server, where they are here."""
    programs.mkdir()
    (programs / "baton").write_text(
        f"#!{sys.executable}\n"
        "from functools import partial\nfrom pathlib import Path\n"
        "from services.launcher.cli import main\nfrom services.launcher.cluster import kubernetes\n"
        f"kubernetes.Secrets = partial(kubernetes.Secrets, Path({str(account)!r}), {api!r})\nmain()\n"
    )
    (programs / "baton").chmod(0o700)
    return programs


def ready(pod: Pod) -> None:
    pod.start()
    until(lambda: pod.probe("readinessProbe"), f"{pod.name} is ready; it said: {pod.said}", READY_S_MAX)


def test_the_manifests_make_a_system_that_serves(build: Build, tmp_path: Path):
    with (
        secrets_api(tmp_path / "account") as api,
        Machine(build("simulated"), tmp_path / "pods", api.secrets) as machine,
    ):
        (tmp_path / "pods").mkdir()
        keys = machine.pod("Job", "keys")
        keys.start(programs=with_account(tmp_path / "programs", tmp_path / "account", api.url))
        assert keys.wait() == 0, keys.said
        ready(machine.pod("StatefulSet", "nats"))
        services = [machine.pod("Deployment", name) for name in ("orchestrator", "collector", "router")]
        workers = [machine.pod("StatefulSet", role) for role in ("prefill", "decode")]
        for pod in (*services, *workers):
            pod.start()
        for pod in (*services, *workers):
            until(lambda pod=pod: pod.probe("readinessProbe"), f"{pod.name} is ready", READY_S_MAX)
        router = services[-1]
        url = f"http://127.0.0.1:{router.ports['http']}"
        key = {"Authorization": f"Bearer {api.files('admin-key')['key'].decode()}"}

        def complete(headers: dict[str, str]) -> httpx.Response:
            body = {"model": "baton-tiny", "prompt": PROMPT, "max_tokens": 4}
            return httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=60, trust_env=False)

        assert complete({}).status_code == 401
        answer = complete(key)
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-baton-prefill-worker"] == "prefill-0"
        assert answer.headers["x-baton-decode-worker"] == "decode-0"

        router.terminate()
        until(lambda: not router.probe("readinessProbe"), "it is taken from the Service")
        assert complete(key).status_code == 200, "and still serves"
        assert router.wait() == 0
