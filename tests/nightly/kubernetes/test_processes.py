"""The manifests of simulated engines, run as processes: keys, NATS, services, workers, requests, rollouts, the planner."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest

from tests.nightly.kubernetes.conftest import Render
from tests.nightly.kubernetes.processes import Build, Machine, Pod
from tests.support.kubernetes_api import KubernetesApi, kubernetes_api
from tests.support.system import until

pytestmark = [pytest.mark.nats, pytest.mark.timeout(900)]

READY_S_MAX = 240.0
PROMPT = list(range(100))
CLIENTS = 6
SERVICES = ("orchestrator", "collector")


class System:
    """The pods of a machine, by name, as controllers of Kubernetes keep them."""

    def __init__(self, machine: Machine, api: KubernetesApi) -> None:
        self.machine = machine
        self.pods: dict[str, Pod] = {}
        self._routers = 0
        self._ending: set[str] = set()
        api.rules = machine.rules_of("keys")
        keys = machine.pod("Job", "keys")
        keys.start()
        assert keys.wait(READY_S_MAX) == 0, keys.said
        self.key = {"Authorization": f"Bearer {api.files('admin-key')['key'].decode()}"}
        self.metrics_key = {"Authorization": f"Bearer {api.files('metrics-key')['key'].decode()}"}
        self.start([machine.pod("StatefulSet", "nats")])

    def start(self, pods: list[Pod]) -> None:
        """Returns when all are ready."""
        for pod in pods:
            self.pods[pod.name] = pod
            pod.start()
        for pod in pods:
            until(lambda pod=pod: pod.probe("readinessProbe"), f"{pod.name} is ready: {pod.said}", READY_S_MAX)

    def start_all(self, **workers: int) -> None:
        pods = [self.machine.pod("Deployment", name) for name in SERVICES]
        pods += [
            self.machine.pod("StatefulSet", role, each) for role, count in workers.items() for each in range(count)
        ]
        self.start([*pods, *(self.next_router() for _ in range(2))])

    def next_router(self) -> Pod:
        self._routers += 1
        return self.machine.pod("Deployment", "router", self._routers)

    def end(self, pod: Pod) -> None:
        """As kubelet does: SIGTERM, and no more than the grace period. A Service leaves out such pods."""
        self._ending.add(pod.name)
        pod.terminate()
        assert pod.wait() == 0, pod.said
        del self.pods[pod.name]
        self._ending.remove(pod.name)

    def roll(self, name: str, number: int) -> None:
        """As a StatefulSet is rolled out: the last pod first, each ready before the next."""
        for each in reversed(range(number)):
            self.end(self.pods[f"{name}-{each}"])
            self.start([self.machine.pod("StatefulSet", name, each)])

    def scale(self, name: str, replicas: int) -> None:
        """As the controller of StatefulSets does: the last pods come and go."""
        running = sum(pod.rpartition("-")[0] == name for pod in self.pods)
        self.start([self.machine.pod("StatefulSet", name, each) for each in range(running, replicas)])
        for each in reversed(range(replicas, running)):
            self.end(self.pods[f"{name}-{each}"])

    def roll_routers(self) -> None:
        """As a Deployment with one pod more than usual."""
        for pod in [pod for name, pod in self.pods.items() if name.startswith("router-")]:
            self.start([self.next_router()])
            self.end(pod)

    def ready_routers(self) -> list[str]:
        here = [pod for name, pod in list(self.pods.items()) if name not in self._ending]
        routers = [pod for pod in here if pod.name.startswith("router-")]
        return [f"http://127.0.0.1:{pod.ports['http']}" for pod in routers if pod.probe("readinessProbe")]


class Clients:
    """Stream answers one after another through a Service, which has the routers that were ready at the last probe, and
    learns only then that one ends.
    """

    def __init__(self, system: System, prompt_tokens: int, tokens: int) -> None:
        self._system = system
        self._prompt_tokens, self._tokens = prompt_tokens, tokens
        self._stopping = threading.Event()
        self._service = system.ready_routers()
        self._period_s = float(system.machine.find("Deployment", "router")["spec"]["template"]["spec"]["containers"][0][
            "readinessProbe"
        ]["periodSeconds"])  # fmt: skip
        self.answers = 0
        self.lost: list[str] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        with ThreadPoolExecutor(CLIENTS + 1) as threads:
            running = [threads.submit(self._follow_service)]
            running += [threads.submit(self._ask, number) for number in range(CLIENTS)]
            try:
                yield
            finally:
                self._stopping.set()
            for one in running:
                one.result()

    def _follow_service(self) -> None:
        while not self._stopping.wait(self._period_s):
            self._service = self._system.ready_routers()

    def _ask(self, client: int) -> None:
        for number in count(client, CLIENTS):
            if self._stopping.is_set():
                return
            try:
                tokens = self._stream(self._service[number % len(self._service)], number)
            except (httpx.HTTPError, AssertionError, IndexError) as error:
                self.lost.append(f"{type(error).__name__}: {error}")
            else:
                self.answers += 1
                if tokens != self._tokens:
                    self.lost.append(f"{tokens} tokens")

    def _stream(self, url: str, number: int) -> int:
        """The number of tokens that arrived."""
        prompt = Random(number).choices(range(500), k=self._prompt_tokens)
        body = {"model": "baton-tiny", "prompt": prompt, "max_tokens": self._tokens, "ignore_eos": True, "stream": True}
        body |= {"stream_options": {"include_usage": True}}
        tokens, ended = 0, False
        with httpx.stream(
            "POST", f"{url}/v1/completions", json=body, headers=self._system.key, timeout=120, trust_env=False
        ) as answer:
            assert answer.status_code == 200, answer.read()
            for line in answer.iter_lines():
                if line == "data: [DONE]":
                    ended = True
                elif line.startswith("data: "):
                    event = json.loads(line.removeprefix("data: "))
                    assert "error" not in event, event
                    tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
        assert ended, "the stream has no end"
        return tokens


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Callable[[list[dict[str, Any]]], tuple[System, KubernetesApi]]]:
    """Starts keys and NATS of these objects."""
    (tmp_path / "pods").mkdir()
    account = tmp_path / "account"
    with kubernetes_api(account) as api:
        machines: list[Machine] = []

        def begun(objects: list[dict[str, Any]]) -> tuple[System, KubernetesApi]:
            machine = Machine(objects, tmp_path / "pods", api, account)
            machines.append(machine)
            return System(machine.__enter__(), api), api

        yield begun
        for machine in machines:
            machine.__exit__()


def test_the_manifests_make_a_system_that_serves(build: Build, run):
    system, _ = run(build("simulated"))
    system.start_all(prefill=1, decode=1)
    [first, _second] = system.ready_routers()

    def complete(headers: dict[str, str]) -> httpx.Response:
        body = {"model": "baton-tiny", "prompt": PROMPT, "max_tokens": 4}
        return httpx.post(f"{first}/v1/completions", json=body, headers=headers, timeout=60, trust_env=False)

    assert complete({}).status_code == 401
    answer = complete(system.key)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-baton-prefill-worker"] == "prefill-0"
    assert answer.headers["x-baton-decode-worker"] == "decode-0"

    collector = f"http://127.0.0.1:{system.pods['collector-0'].ports['http']}"
    scraped = httpx.get(f"{collector}/metrics", headers=system.metrics_key, timeout=30, trust_env=False)
    assert scraped.status_code == 200
    assert complete(system.metrics_key).status_code == 403, "the key for metrics asks no engine"

    tools = system.machine.pod("Deployment", "tools")
    tools.start()
    listed = until(lambda: tools.execute(["baton", "workers"]), "the operator's commands have a place")
    assert listed.returncode == 0, listed.stderr
    assert {"prefill-0", "decode-0"} <= set(listed.stdout.split())

    router = system.pods["router-1"]
    router.terminate()
    until(lambda: not router.probe("readinessProbe"), "it is taken from the Service")
    assert complete(system.key).status_code == 200, "and still serves"
    assert router.wait() == 0


def test_rollouts_of_workers_and_routers_lose_no_request(build: Build, run):
    system, _ = run(build("simulated"))
    system.start_all(prefill=2, decode=2)
    clients = Clients(system, prompt_tokens=100, tokens=120)

    with clients.running():
        until(lambda: clients.answers > CLIENTS, "clients have answers", READY_S_MAX)
        system.roll("decode", 2)
        system.roll("prefill", 2)
        system.roll_routers()
        enough = clients.answers + CLIENTS
        until(lambda: clients.answers > enough, "they still do", READY_S_MAX)

    assert clients.lost == []
    assert clients.answers > 30


def test_the_planner_scales_statefulsets_through_the_api_server(render: Render, run):
    """Prompts that one prefill worker cannot compute in time, and then none."""
    objects = render(
        {
            "orchestrator": {"planner": True, "replicas": 1},
            "settings": {
                "WORKER_ENGINE": "simulated",
                "WORKER_SIMULATED": "prefill_tokens_per_s=1500",
                "ORCHESTRATOR_PLANNER_TIME_SCALE": 0.05,
            },
            "workers": {"prefill": {"role": "prefill", "replicasMax": 2}, "decode": {"role": "decode"}},
        }
    )
    system, api = run(objects)
    api.rules = system.machine.rules_of("planner")
    api.replicas = {"prefill": 1, "decode": 1}
    system.start_all(prefill=1, decode=1)
    clients = Clients(system, prompt_tokens=500, tokens=4)

    with clients.running():
        until(lambda: api.replicas == {"prefill": 2, "decode": 1}, "a prefill worker more is wanted", READY_S_MAX)
        system.scale("prefill", 2)
        enough = clients.answers + 3 * CLIENTS
        until(lambda: clients.answers > enough, "clients still have answers", READY_S_MAX)
    until(lambda: api.replicas == {"prefill": 1, "decode": 1}, "it is not wanted any more", READY_S_MAX)
    system.scale("prefill", 1)

    assert clients.lost == []
    changed = {path.rpartition("/statefulsets/")[2] for path in api.asked if "/apis/apps/" in path}
    assert changed == {"prefill/scale"}
