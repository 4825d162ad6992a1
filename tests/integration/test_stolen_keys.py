"""What a stolen key, of a party or of one worker, does to the key-value buckets and to others' subjects, on a real
nats-server with the permissions of `baton init`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import nats
import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg

from shared.bus.jetstream import settings_of, stream_config
from shared.bus.nats_bus import connect_nats
from shared.bus.nats_kv_store import NatsKeyValueStore
from shared.bus.wire import pack
from shared.contracts.channels import DECISION, KEY_VALUE_CHANNELS, WORKER_RECORDS, Party, bucket_of
from shared.contracts.decisions import AskDecision, FoundDecision
from shared.contracts.workers import WORKER_RECORD_TTL_S, WorkerRecord
from tests.contracts.examples import example
from tests.integration.bus.worlds import until
from tests.support.cluster_keys import ClusterKeys

pytestmark = pytest.mark.nats

SOON_S = 30.0
QUIET_S = 0.5
"""Nobody answers within so long who was not asked."""
THIEF, VICTIM = "w-thief", "w-victim"
OWN_KEY = f"worker.{THIEF}"
STOLEN = (OWN_KEY, Party.WORKER, Party.ROUTER, Party.COLLECTOR, Party.LAUNCHER)
"""Everybody but the orchestrator, which makes the buckets."""
CONFIG = stream_config("workers", WORKER_RECORD_TTL_S)


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    return ClusterKeys(tmp_path_factory.mktemp("keys"), THIEF, VICTIM)


@pytest.fixture
async def join(guarded, keys):
    """Connects as the owner of a key."""
    buses = []

    async def connect(owner):
        buses.append(await connect_nats(guarded.url, name=owner, connect_s_max=SOON_S, access=keys.access(owner)))
        return buses[-1]

    yield connect
    for bus in buses:
        await bus.close()


async def read_present(watching):
    """Until the watch has yielded all that is stored."""
    while await anext(watching) is not None:
        pass


class Thief:
    """nats-py itself with a stolen key."""

    def __init__(self, nc: Client, inbox: str) -> None:
        self._nc = nc
        self._inbox = inbox
        self.refused: set[str] = set()

    async def on_error(self, error: Exception) -> None:
        self.refused.add(str(error).partition('"')[2].rstrip('"'))

    async def publish(self, subject: str, payload: bytes = b"", *, reply: str = "", **headers: str) -> None:
        await self._nc.publish(
            subject, payload, reply, {name.replace("_", "-"): text for name, text in headers.items()}
        )
        await self._nc._flush_pending(force_flush=True)
        await self._nc.flush(SOON_S)  # type: ignore[arg-type]

    async def ask(self, subject: str, payload: bytes, **headers: str) -> Any:
        """The JSON reply; None if the server refuses or nobody replies."""
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

        async def on_answer(msg: Msg) -> None:
            if not answer.done():
                answer.set_result(msg.data)

        inbox = f"{self._inbox}.{self._nc.new_inbox().rpartition('.')[2]}"
        subscription = await self._nc.subscribe(inbox, cb=on_answer)
        await self.publish(subject, payload, reply=inbox, **headers)
        try:
            async with asyncio.timeout(QUIET_S):
                return json.loads(await answer or "null")
        except TimeoutError:
            return None
        finally:
            await subscription.unsubscribe()

    async def hear(self, subject: str) -> list[Msg]:
        heard: list[Msg] = []

        async def on_message(msg: Msg) -> None:
            heard.append(msg)

        await self._nc.subscribe(subject, cb=on_message)
        await self._nc.flush(SOON_S)  # type: ignore[arg-type]
        return heard


@asynccontextmanager
async def thief_with(server, keys, owner) -> AsyncIterator[Thief]:
    thief: Thief | None = None

    async def on_error(error: Exception) -> None:
        if thief is not None:
            await thief.on_error(error)

    nc = await nats.connect(server.url, error_cb=on_error, **keys.raw_options(owner))
    thief = Thief(nc, f"_INBOX.{owner}")
    try:
        yield thief
    finally:
        await nc.close()


def record(worker_id: str, **changes: Any) -> WorkerRecord:
    return msgspec.structs.replace(example(WorkerRecord), worker_id=worker_id, **changes)


def api(stream: str) -> set[str]:
    """JetStream's API for a stream, and for all of them."""
    of_stream = [
        *("STREAM.CREATE", "STREAM.UPDATE", "STREAM.DELETE", "STREAM.PURGE", "STREAM.MSG.DELETE", "STREAM.SNAPSHOT"),
        *("STREAM.RESTORE", "STREAM.LEADER.STEPDOWN", "STREAM.PEER.REMOVE", "CONSUMER.NAMES", "CONSUMER.LIST"),
        *("CONSUMER.CREATE", "DIRECT.GET"),
    ]
    of_consumer = [
        *(f"CONSUMER.CREATE.{stream}.c", f"CONSUMER.CREATE.{stream}.c.$KV.workers.>", f"CONSUMER.INFO.{stream}.c"),
        *(f"CONSUMER.DURABLE.CREATE.{stream}.c", f"CONSUMER.DELETE.{stream}.c", f"CONSUMER.MSG.NEXT.{stream}.c"),
        *(f"CONSUMER.PAUSE.{stream}.c", f"CONSUMER.LEADER.STEPDOWN.{stream}.c", f"CONSUMER.RESET.{stream}.c"),
        *(f"CONSUMER.UNPIN.{stream}.c", f"DIRECT.GET.{stream}.$KV.workers.{VICTIM}"),
    ]
    of_account = [
        *("INFO", "STREAM.NAMES", "STREAM.LIST", "META.LEADER.STEPDOWN", "SERVER.REMOVE", "ACCOUNT.PURGE.$G"),
        *("ACCOUNT.STREAM.MOVE.$G.x", "STREAM.TEMPLATE.CREATE.t", "STREAM.CREATE.mine", "STREAM.INFO.mine"),
    ]
    verbs = [f"{verb}.{stream}" for verb in of_stream] + of_consumer + of_account
    return {f"$JS.API.{verb}" for verb in verbs} | {f"$JS.ACK.{stream}.c.1.1.1.1.1", f"$JS.FC.{stream}.c.x", "$JSC.R.x"}


@pytest.mark.parametrize("owner", [*STOLEN, Party.ORCHESTRATOR])
async def test_of_jetstreams_api_a_party_has_what_reading_takes_and_an_orchestrator_what_making_takes(
    guarded, keys, owner
):
    forbidden = {subject for row in KEY_VALUE_CHANNELS for subject in api(f"KV_{bucket_of(row)}")}
    forbidden |= {f"stored.workers.{VICTIM}", f"stored.leaders.{VICTIM}", "stored.routing.everyone"}
    if owner is Party.ORCHESTRATOR:
        may = {f"$JS.API.STREAM.{verb}.KV_{bucket_of(row)}" for verb in MAKING for row in KEY_VALUE_CHANNELS}
        forbidden -= may

    async with thief_with(guarded, keys, owner) as thief:
        for subject in forbidden:
            await thief.publish(subject)

        assert thief.refused == {subject.lower() for subject in forbidden}


MAKING = ("CREATE", "UPDATE", "DELETE")


@pytest.mark.parametrize("owner", STOLEN)
async def test_no_key_changes_the_registry_or_has_it_delivered_elsewhere(guarded, keys, join, owner):
    registry = await (await join(f"worker.{VICTIM}")).key_value_store(WORKER_RECORDS)
    orchestrator = await join(Party.ORCHESTRATOR)
    drains = f"worker.{VICTIM}.drain"

    async with thief_with(guarded, keys, owner) as thief, thief_with(guarded, keys, f"worker.{VICTIM}") as victim:
        ordered = await victim.hear(drains)
        for change in (
            {"subjects": [*CONFIG["subjects"], "leg.*.start"]},
            {"republish": {"src": f"$KV.workers.{THIEF}", "dest": drains}},
            {"sealed": True},
        ):
            assert await thief.ask("$JS.API.STREAM.UPDATE.KV_workers", json.dumps(CONFIG | change).encode()) is None
        consumer = {"deliver_subject": drains, "ack_policy": "none", "deliver_policy": "all"}
        for name in ("", ".c", f".c.$KV.workers.{THIEF}"):
            body = {"stream_name": "KV_workers", "config": consumer | ({"name": "c"} if name else {})}
            assert await thief.ask(f"$JS.API.CONSUMER.CREATE.KV_workers{name}", json.dumps(body).encode()) is None
        for verb in ("STREAM.PURGE", "STREAM.DELETE", "STREAM.SNAPSHOT"):
            assert await thief.ask(f"$JS.API.{verb}.KV_workers", b"") is None
        await thief.publish(f"$KV.workers.{THIEF}", pack(record(THIEF)))
        await registry.put(record(VICTIM))

        info = json.loads(await orchestrator.request("$JS.API.STREAM.INFO.KV_workers", b"", None, SOON_S))
        assert settings_of(info["config"]) == settings_of(CONFIG)
        assert info["state"]["consumer_count"] == 0
        assert ordered == []
    assert (await registry.get(VICTIM)).value == record(VICTIM)


async def test_headers_of_a_record_have_no_effect_beyond_it(guarded, keys, join):
    watching = (await (await join(Party.ROUTER)).key_value_store(WORKER_RECORDS)).watch()
    registry = await (await join(f"worker.{VICTIM}")).key_value_store(WORKER_RECORDS)
    await registry.put(record(VICTIM))
    async with asyncio.timeout(SOON_S):
        await read_present(watching)
        own = f"$KV.workers.{THIEF}"
        async with thief_with(guarded, keys, OWN_KEY) as thief:
            for headers in (
                {"Nats_Rollup": "all"},
                {"Nats_Rollup": "sub"},
                {"Nats_TTL": "never"},
                {"Nats_Schedule": "@every 1s", "Nats_Schedule_Target": f"worker.{VICTIM}.drain"},
                {"Nats_Incr": "1"},
                {"Nats_Batch_Id": "b", "Nats_Batch_Sequence": "1", "Nats_Batch_Commit": "1"},
            ):
                reply = await thief.ask(own, pack(record(THIEF)), **headers)
                assert reply["error"], headers
            forged = {"Nats_Sequence": "1", "Nats_Stream": "KV_leaders", "Nats_Subject": f"$KV.workers.{VICTIM}"}
            stored = await thief.ask(own, pack(record(THIEF)), **forged)
        change = await anext(watching)

    assert (change.key, change.value, change.revision) == (THIEF, record(THIEF), stored["seq"])
    assert (await registry.get(VICTIM)).value == record(VICTIM)


async def test_replies_of_jetstream_directed_to_the_registrys_subject_deceive_no_watch(guarded, keys, join):
    router = await join(Party.ROUTER)
    watching = (await router.key_value_store(WORKER_RECORDS)).watch()
    registry = await (await join(f"worker.{VICTIM}")).key_value_store(WORKER_RECORDS)
    await registry.put(record(VICTIM))
    async with asyncio.timeout(SOON_S):
        await read_present(watching)
        target = f"stored.workers.{VICTIM}"
        async with thief_with(guarded, keys, OWN_KEY) as thief:
            await thief.publish(f"$KV.workers.{THIEF}", pack(record(THIEF)), reply=target)
            wanted = json.dumps({"last_by_subj": f"$KV.workers.{THIEF}"}).encode()
            await thief.publish("$JS.API.STREAM.MSG.GET.KV_workers", wanted, reply=target)
            await thief.publish("$JS.API.STREAM.INFO.KV_workers", b"", reply=target)
        await until(lambda: router.counts.bad_messages == 3)
        await registry.put(record(VICTIM, note="true"))
        changes = [await anext(watching), await anext(watching)]

    assert [(change.key, change.value.note) for change in changes] == [(THIEF, record(THIEF).note), (VICTIM, "true")]


@pytest.mark.parametrize("target", ["leg.w-victim.start", "worker.w-victim.drain", "$JS.API.STREAM.DELETE.KV_workers"])
async def test_a_reply_subject_permits_nothing(guarded, keys, target):
    """NATS's ``allow_responses`` would permit it: who names a reply subject in an ask to itself might publish there."""
    async with thief_with(guarded, keys, OWN_KEY) as thief:
        heard = await thief.hear(f"kv.{THIEF}.handshake.{THIEF}")
        await thief.publish(f"kv.{THIEF}.handshake.{THIEF}", b"", reply=target)
        await until(lambda: heard)

        await thief.publish(target, b"forged")

        assert thief.refused == {target.lower()}


async def test_no_party_replies_to_a_subject_that_is_no_inbox(guarded, keys, join):
    router = await join(Party.ROUTER)

    async def answer(_ask, _envelope):
        return FoundDecision(decision=None)

    await router.answer(DECISION, answer, router_id="r1")
    async with (
        thief_with(guarded, keys, Party.COLLECTOR) as thief,
        thief_with(guarded, keys, f"worker.{VICTIM}") as victim,
    ):
        started = await victim.hear(f"leg.{VICTIM}.start")
        await thief.publish("router.r1.decision", pack(AskDecision(router_id="r1")), reply=f"leg.{VICTIM}.start")
        await until(lambda: router.counts.bad_messages)
        await router.flush(SOON_S)
        await victim.publish(f"service.worker.{VICTIM}")

    assert started == []


async def test_a_worker_cannot_say_that_another_subject_has_no_subscriber(guarded, keys, join):
    """A router places a leg again when the server says so below its inbox."""
    router = await join(Party.ROUTER)
    told: list[str] = []
    router.on_unreachable(told.append)
    notices = router._inbox.for_key("leg-1")

    async with thief_with(guarded, keys, OWN_KEY) as thief:
        await thief.publish(notices, b"", Status="503")

        assert thief.refused == {notices.lower()}
    assert told == []


async def test_a_watch_of_a_store_opened_without_permission_yields_nothing(guarded, keys, join):
    worker = await join(OWN_KEY)
    leaders = next(row for row in KEY_VALUE_CHANNELS if bucket_of(row) == "leaders")

    with pytest.raises(TimeoutError):
        async with asyncio.timeout(QUIET_S):
            await anext(NatsKeyValueStore(worker, leaders).watch())
