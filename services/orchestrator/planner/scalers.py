"""Start and stop workers for the planner: through the launcher of this machine, a webhook, or Kubernetes."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Protocol

import httpx
import msgspec

from services.orchestrator.settings import Settings
from shared.bus.port import Bus, BusError, NoResponders
from shared.contracts.channels import SCALE
from shared.contracts.planning import FleetScaled, ScaleFleet
from shared.contracts.workers import FleetWorker, Role, WorkerPhase
from shared.kubernetes import NoAccount, ServiceAccount

SCALER_S_MAX = 10.0
"""Time limit for the scaler's reply."""
REFUSAL_CHARS_MAX = 200
"""Length of the part of a reply that a refusal quotes."""
NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
"""What Kubernetes permits as the name of a StatefulSet whose pods are hosts."""
WRITES_MAX = 3
"""Times that a number of replicas is written, where another client changes it at the same time."""
CONFLICT = 409
OVER = {WorkerPhase.GONE, WorkerPhase.LOST}


class Scaler(Protocol):
    """Starts and stops workers. A refusal is returned as text, never raised."""

    async def scale(self, order: ScaleFleet) -> FleetScaled:
        """Begin to start or stop workers; returns what was begun."""


class LauncherScaler:
    """Asks ``baton up --workers-max``, over the bus."""

    def __init__(self, bus: Bus, reply_s_max: float) -> None:
        self._bus = bus
        self._reply_s_max = reply_s_max

    async def scale(self, order: ScaleFleet) -> FleetScaled:
        try:
            return await self._bus.ask(SCALE, order, timeout_s=self._reply_s_max)
        except NoResponders:
            return FleetScaled(refusal="no launcher scales: start one with `baton up --workers-max N`")
        except BusError as error:
            return FleetScaled(refusal=f"the launcher did not reply: {error or type(error).__name__}")


class WebhookScaler:
    """Posts the order as JSON. An empty reply means that it is carried out; any other is a ``FleetScaled``."""

    def __init__(self, url: str, reply_s_max: float) -> None:
        self._url = url
        self._reply_s_max = reply_s_max

    async def scale(self, order: ScaleFleet) -> FleetScaled:
        try:
            async with httpx.AsyncClient(timeout=self._reply_s_max, trust_env=False) as client:
                reply = await client.post(
                    self._url, content=msgspec.json.encode(order), headers={"content-type": "application/json"}
                )
            return self._read(reply, order)
        except httpx.HTTPError as error:
            return FleetScaled(refusal=f"{self._url} cannot be reached: {error or type(error).__name__}")
        except msgspec.DecodeError as error:
            return FleetScaled(refusal=f"{self._url} replies with what is no FleetScaled: {error}")

    def _read(self, reply: httpx.Response, order: ScaleFleet) -> FleetScaled:
        """Raises msgspec.DecodeError."""
        if not reply.is_success:
            text = reply.text[:REFUSAL_CHARS_MAX]
            return FleetScaled(refusal=f"{self._url} replies {reply.status_code}: {text}".rstrip(": "))
        if not reply.content.strip():
            return FleetScaled(change=order.change)
        return msgspec.json.decode(reply.content, type=FleetScaled)


class StatefulSet(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One of Kubernetes, whose pods are workers: the name of a pod is the id of its worker."""

    role: Role
    """The role in which its workers start."""
    model: str = ""
    """The model's primary name in requests; empty: any."""
    replicas_max: Annotated[int, msgspec.Meta(ge=1)]
    """Maximum number of its pods: only so many have keys."""

    def serves(self, model: str) -> bool:
        return self.model in ("", model)


def read_stateful_sets(text: str) -> dict[str, StatefulSet]:
    """The setting ORCHESTRATOR_STATEFUL_SETS. Raises ValueError with a message for the operator."""
    try:
        found = msgspec.json.decode(text.strip().encode() or b"{}", type=dict[str, StatefulSet])
    except msgspec.DecodeError as error:
        raise ValueError(f"ORCHESTRATOR_STATEFUL_SETS: {error}") from error
    if wrong := next((name for name in found if not NAME.fullmatch(name)), None):
        raise ValueError(f"ORCHESTRATOR_STATEFUL_SETS: {wrong!r} is no name of a StatefulSet")
    return found


class _Refused(Exception):
    """The API server does not do it; the message says why."""


@dataclass(frozen=True, slots=True)
class _Pods:
    """What is known of the pods of a StatefulSet, of which Kubernetes adds and removes the last ones."""

    name: str
    role_at_start: Role
    count: int
    registered: Mapping[str, FleetWorker]

    def last_in(self, role: Role) -> int:
        """How many of the last pods have the role now. One that has not registered will start in the set's role."""
        number = 0
        while number < self.count and self._role_of(self.count - 1 - number) is role:
            number += 1
        return number

    @property
    def last(self) -> str:
        """The last pod and its role, as text."""
        return f"{self.name}-{self.count - 1} is {self._role_of(self.count - 1)}" if self.count else ""

    def _role_of(self, number: int) -> Role:
        worker = self.registered.get(f"{self.name}-{number}")
        return worker.record.role if worker else self.role_at_start

    def no_growth(self, revision: str) -> str:
        """Why a further pod would not be what is wanted; empty if it would."""
        names = [f"{self.name}-{number}" for number in range(self.count)]
        if missing := [name for name in names if name not in self.registered]:
            return f"{missing[0]} has not registered yet; `kubectl describe pod {missing[0]}` says why"
        records = [self.registered[name].record for name in names]
        newest = max(records, key=lambda record: record.epoch, default=None)
        if revision and newest is not None and newest.fingerprint.revision not in ("", revision):
            return f"{newest.worker_id} has another revision, and so would a new pod"
        return ""


class StatefulSetScaler:
    """Changes the replicas of StatefulSets through their subresource ``scale``, as `kubectl scale` does.

    A worker that changed its role keeps its pod. So workers are removed from a StatefulSet whose last pods have the
    role now, whatever they started as.
    """

    def __init__(
        self,
        sets: Mapping[str, StatefulSet],
        fleet: Callable[[], Sequence[FleetWorker]],
        account: ServiceAccount,
        reply_s_max: float,
    ) -> None:
        self._sets = sets
        self._fleet = fleet
        self._account = account
        self._reply_s_max = reply_s_max

    async def scale(self, order: ScaleFleet) -> FleetScaled:
        mine = {name: each for name, each in self._sets.items() if each.serves(order.model)}
        if order.change > 0:
            mine = {name: each for name, each in mine.items() if each.role is order.role}
        if not mine:
            return FleetScaled(refusal=f"ORCHESTRATOR_STATEFUL_SETS has none for {order.role} of {order.model}")
        refusals = []
        try:
            async with self._client() as client:
                for name, one in mine.items():
                    done, refusal = await self._change(client, name, one, order)
                    if done:
                        return FleetScaled(change=done, refusal=refusal)
                    refusals.append(refusal)
        except (_Refused, NoAccount) as error:
            refusals.append(str(error))
        except httpx.HTTPError as error:
            refusals.append(f"the API server of Kubernetes does not answer: {error or type(error).__name__}")
        return FleetScaled(refusal="; ".join(each for each in refusals if each))

    def _client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(
            base_url=f"{self._account.server}/apis/apps/v1/namespaces/{self._account.namespace}/statefulsets",
            headers=self._account.headers,
            verify=self._account.trust(),
            timeout=self._reply_s_max,
            trust_env=False,
        )

    async def _change(
        self, client: httpx.AsyncClient, name: str, one: StatefulSet, order: ScaleFleet
    ) -> tuple[int, str]:
        """The number of pods that come or go, and why it is less than the order's."""
        path = f"/{name}/scale"
        for _ in range(WRITES_MAX):
            found = await self._asked(client, "GET", path)
            count = int(found.get("spec", {}).get("replicas", 0))
            change, refusal = self._possible(name, one, order, count)
            if not change:
                return 0, refusal
            # It has the revision that was read: a change made meanwhile is a conflict, and is not undone.
            wanted = {**found, "spec": {**found.get("spec", {}), "replicas": count + change}}
            if await self._asked(client, "PUT", path, wanted):
                return change, refusal
        return 0, f"another client changes the replicas of {name} at the same time"

    def _possible(self, name: str, one: StatefulSet, order: ScaleFleet, count: int) -> tuple[int, str]:
        """The part of the order that is possible, and why it is less than all."""
        registered = {str(each.record.worker_id): each for each in self._fleet() if each.phase not in OVER}
        pods = _Pods(name, one.role, count, registered)
        if order.change < 0:
            gone = min(-order.change, pods.last_in(order.role))
            return -gone, "" if gone == -order.change else f"{pods.last or f'{name} has no pods'}"
        if refusal := pods.no_growth(order.revision):
            return 0, refusal
        more = max(0, min(order.change, one.replicas_max - count))
        return more, "" if more == order.change else f"{name} has {count} replicas, its maximum is {one.replicas_max}"

    async def _asked(
        self, client: httpx.AsyncClient, method: str, path: str, body: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """The answer; empty for a conflict. Raises _Refused, httpx.HTTPError."""
        reply = await client.request(method, path, json=body)
        if reply.status_code == CONFLICT:
            return {}
        if not reply.is_success:
            text = reply.text[:REFUSAL_CHARS_MAX]
            raise _Refused(f"the API server of Kubernetes refuses {method} {path}: {reply.status_code} {text}")
        try:
            answer = msgspec.json.decode(reply.content, type=dict[str, Any])
            int(answer.get("spec", {}).get("replicas", 0))
        except (msgspec.DecodeError, AttributeError, TypeError, ValueError) as error:
            raise _Refused(f"the API server of Kubernetes answers {method} {path} with no Scale: {error}") from error
        return answer


def stateful_set_scaler(settings: Settings, fleet: Callable[[], Sequence[FleetWorker]]) -> StatefulSetScaler | None:
    """None if the settings name no StatefulSets. Raises ValueError with a message for the operator."""
    sets = read_stateful_sets(settings.stateful_sets)
    if not sets:
        return None
    if settings.scaler_url:
        raise ValueError("ORCHESTRATOR_STATEFUL_SETS: ORCHESTRATOR_SCALER_URL is set, too, and only one of them scales")
    try:
        return StatefulSetScaler(sets, fleet, ServiceAccount(), SCALER_S_MAX)
    except NoAccount as error:
        raise ValueError(
            f"ORCHESTRATOR_STATEFUL_SETS is for a pod whose service account may scale them: {error}"
        ) from error


def make_scaler(bus: Bus, settings: Settings, fleet: Callable[[], Sequence[FleetWorker]]) -> Scaler:
    """The scaler that the settings choose. Raises ValueError with a message for the operator."""
    if kubernetes := stateful_set_scaler(settings, fleet):
        return kubernetes
    return (
        WebhookScaler(settings.scaler_url, SCALER_S_MAX) if settings.scaler_url else LauncherScaler(bus, SCALER_S_MAX)
    )
