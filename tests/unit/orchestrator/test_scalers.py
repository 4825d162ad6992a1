"""Scalers: what a webhook is sent and how its replies are read; the replicas of StatefulSets."""

from __future__ import annotations

import json
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from services.launcher.cluster.certificates import new_authority
from services.orchestrator.planner.scalers import StatefulSet, StatefulSetScaler, WebhookScaler
from services.orchestrator.service import check
from services.orchestrator.settings import Settings
from shared.contracts.planning import FleetScaled, ScaleFleet
from shared.contracts.workers import FleetWorker, Role, WorkerPhase
from shared.kubernetes import ServiceAccount
from shared.runtime.settings import SettingsError
from tests.support.fleet_builders import record
from tests.support.kubernetes_api import TOKEN, KubernetesApi, kubernetes_api
from tests.support.nats_server import free_port

Scale = Callable[..., Awaitable[FleetScaled]]
ORDER = ScaleFleet(model="m", revision="r2", role=Role.DECODE, change=2, why="decode is full")
REPLY_S_MAX = 10.0
POLL_S = 0.02


@contextmanager
def endpoint(status: int, body: bytes) -> Iterator[tuple[str, list[dict]]]:
    """Its URL, and what was posted to it."""
    posted: list[dict] = []

    class Hook(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            posted.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_text: object) -> None:
            """Nothing."""

    server = HTTPServer(("127.0.0.1", 0), Hook)
    thread = threading.Thread(target=server.serve_forever, args=(POLL_S,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/scale", posted
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


async def test_the_order_is_posted_and_an_empty_reply_accepts_it():
    with endpoint(204, b"") as (url, posted):
        assert await WebhookScaler(url, REPLY_S_MAX).scale(ORDER) == FleetScaled(change=2)

    assert posted == [{"model": "m", "revision": "r2", "role": "decode", "change": 2, "why": "decode is full"}]


@pytest.mark.parametrize(
    ("status", "body", "change", "text"),
    [
        (200, b'{"change": 1, "refusal": "quota"}', 1, "quota"),
        (409, b"not now", 0, "replies 409: not now"),
        (200, b"<html>", 0, "no FleetScaled"),
        (200, b'{"change": "many"}', 0, "no FleetScaled"),
    ],
)
async def test_a_webhook_may_do_less_or_nothing(status: int, body: bytes, change: int, text: str):
    with endpoint(status, body) as (url, _posted):
        scaled = await WebhookScaler(url, REPLY_S_MAX).scale(ORDER)

    assert scaled.change == change
    assert text in scaled.refusal


async def test_an_unreachable_webhook_is_a_refusal():
    scaled = await WebhookScaler(f"http://127.0.0.1:{free_port()}/", REPLY_S_MAX).scale(ORDER)

    assert scaled.change == 0
    assert "cannot be reached" in scaled.refusal


SETS = {
    "prefill": StatefulSet(role=Role.PREFILL, model="m", replicas_max=4),
    "decode": StatefulSet(role=Role.DECODE, model="m", replicas_max=4),
    "other": StatefulSet(role=Role.DECODE, model="another", replicas_max=4),
}
SCALE_ONLY = (
    {"apiGroups": ["apps"], "resources": ["statefulsets/scale"], "resourceNames": [*SETS], "verbs": ["get", "update"]},
)


def workers(revision: str = "r2", **roles: Role) -> list[FleetWorker]:
    """``decode_0=Role.PREFILL``: the pod decode-0 prefills now."""
    return [
        FleetWorker(
            record=record(name.replace("_", "-"), role=role, revision=revision),
            phase=WorkerPhase.READY,
            since_s=9.0,
            silent_s=0.0,
        )
        for name, role in roles.items()
    ]


ALL = workers(prefill_0=Role.PREFILL, prefill_1=Role.PREFILL, decode_0=Role.DECODE, decode_1=Role.DECODE)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[KubernetesApi, Path]]:
    account = tmp_path_factory.mktemp("pod") / "account"
    with kubernetes_api(account, SCALE_ONLY) as api:
        yield api, account


@pytest.fixture
def api(server: tuple[KubernetesApi, Path]) -> KubernetesApi:
    found, _account = server
    found.replicas = {"prefill": 2, "decode": 2, "other": 1}
    found.asked.clear()
    found.meddles.clear()
    found.rules, found.token = SCALE_ONLY, TOKEN
    return found


@pytest.fixture
def scale(server: tuple[KubernetesApi, Path], api: KubernetesApi) -> Scale:
    async def scaled(role: Role, change: int, fleet: list[FleetWorker] = ALL, model: str = "m") -> FleetScaled:
        account = ServiceAccount(server[1], api.url)
        order = ScaleFleet(model=model, revision="r2", role=role, change=change, why="load")
        return await StatefulSetScaler(SETS, lambda: fleet, account, REPLY_S_MAX).scale(order)

    return scaled


async def test_replicas_change_through_the_subresource_scale_and_nothing_else(scale: Scale, api: KubernetesApi):
    assert await scale(Role.DECODE, 2) == FleetScaled(change=2)
    assert await scale(Role.PREFILL, -1) == FleetScaled(change=-1)

    assert api.replicas == {"prefill": 1, "decode": 4, "other": 1}
    path = "/apis/apps/v1/namespaces/baton/statefulsets"
    assert api.asked == [f"PUT {path}/decode/scale", f"PUT {path}/prefill/scale"]


async def test_pods_of_other_models_stay(scale: Scale, api: KubernetesApi):
    fleet = workers(other_0=Role.DECODE)

    assert (await scale(Role.DECODE, 1, fleet, model="another")).change == 1
    assert (await scale(Role.DECODE, 1, fleet, model="none")).refusal.endswith("has none for decode of none")
    assert api.replicas == {"prefill": 2, "decode": 2, "other": 2}


async def test_no_more_pods_than_there_are_keys(scale: Scale, api: KubernetesApi):
    scaled = await scale(Role.DECODE, 3)

    assert (scaled.change, api.replicas["decode"]) == (2, 4)
    assert "its maximum is 4" in scaled.refusal


async def test_a_pod_that_has_not_started_gets_no_further_ones(scale: Scale, api: KubernetesApi):
    api.replicas["decode"] = 3

    scaled = await scale(Role.DECODE, 1)

    assert (scaled.change, api.replicas["decode"]) == (0, 3)
    assert "decode-2 has not registered yet; `kubectl describe pod decode-2` says why" in scaled.refusal


async def test_a_worker_is_removed_where_the_last_pod_has_the_role_now(scale: Scale, api: KubernetesApi):
    changed = workers(
        prefill_0=Role.PREFILL, prefill_1=Role.DECODE, decode_0=Role.DECODE, decode_1=Role.DECODE, other_0=Role.DECODE
    )

    kept = await scale(Role.PREFILL, -1, changed)
    assert kept.change == 0
    assert "prefill-1 is decode" in kept.refusal
    assert api.asked == []
    assert (await scale(Role.DECODE, -1, changed)).change == -1
    assert api.replicas == {"prefill": 1, "decode": 2, "other": 1}, "prefill-1 decodes, and is the last of its set"


async def test_a_change_of_another_client_is_read_again_and_not_undone(scale: Scale, api: KubernetesApi):
    api.meddles = [1]
    assert (await scale(Role.DECODE, 1)).change == 1
    assert api.replicas["decode"] == 2

    api.meddles = [2, 2, 2]
    scaled = await scale(Role.DECODE, 1)
    assert scaled.change == 0
    assert "another client changes the replicas of decode" in scaled.refusal


async def test_a_new_pod_must_have_the_revision_that_is_wanted(scale: Scale, api: KubernetesApi):
    scaled = await scale(Role.DECODE, 1, workers("r3", decode_0=Role.DECODE, decode_1=Role.DECODE))

    assert scaled.change == 0
    assert "another revision" in scaled.refusal
    assert api.asked == []


async def test_a_set_without_pods_grows(scale: Scale, api: KubernetesApi):
    api.replicas["decode"] = 0

    assert (await scale(Role.DECODE, 1, [])).change == 1
    assert api.replicas["decode"] == 1


async def test_what_the_api_server_refuses_is_said(scale: Scale, api: KubernetesApi):
    api.rules = ()
    assert "refuses GET /decode/scale: 403" in (await scale(Role.DECODE, 1)).refusal
    api.rules, api.token = SCALE_ONLY, "a-newer-one"
    assert "401" in (await scale(Role.DECODE, 1)).refusal
    assert "has none for both of m" in (await scale(Role.BOTH, 1)).refusal
    assert api.asked == []


async def test_an_api_server_that_the_clusters_ca_did_not_sign_is_not_believed(
    api: KubernetesApi, server: tuple[KubernetesApi, Path], tmp_path: Path
):
    for name in ("token", "namespace"):
        (tmp_path / name).write_text((server[1] / name).read_text())
    (tmp_path / "ca.crt").write_bytes(new_authority(["127.0.0.1"], datetime.now(UTC)).certificate)
    scaler = StatefulSetScaler(SETS, lambda: ALL, ServiceAccount(tmp_path, api.url), REPLY_S_MAX)

    assert "does not answer" in (await scaler.scale(ORDER)).refusal
    assert api.asked == []


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"stateful_sets": '{"decode": {"role": "decode"}}'}, "missing required field `replicas_max`"),
        ({"stateful_sets": '{"De code": {"role": "decode", "replicas_max": 1}}'}, "no name of a StatefulSet"),
        ({"stateful_sets": '{"decode": {"role": "decode", "replicas_max": 1}}'}, "for a pod whose service account"),
        (
            {"stateful_sets": '{"decode": {"role": "decode", "replicas_max": 1}}', "scaler_url": "http://x"},
            "ORCHESTRATOR_SCALER_URL is set, too",
        ),
    ],
)
def test_a_wrong_setting_stops_the_start(values: dict[str, str], message: str):
    with pytest.raises(SettingsError, match=message):
        check(Settings(**values))
