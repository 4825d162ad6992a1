"""No message on the bus ends a process, and requests are served meanwhile."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from typing import Any

import msgspec
import nats
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shared.bus.nats_bus import connect_nats
from shared.bus.port import Bus, Envelope
from shared.bus.wire import BadMessage, pack, unpack
from shared.contracts.channels import (
    CHANGE_ROLE,
    CHANNELS,
    DRAIN,
    PLACEHOLDER,
    REQUESTS_FINISHED,
    WORKER_RECORDS,
    Channel,
    Delivery,
)
from shared.contracts.control import AskTokenizer, TokenizerAsset
from shared.contracts.inference import RequestsFinished
from tests.contracts.examples import strategy
from tests.contracts.golden_files import FOLDER as GOLDEN
from tests.support.mutated_tokenizers import PROMPTS, Mutant
from tests.support.system import SOON_S_MAX, System, until
from tests.unit.router.fake_worker import FakeWorker

pytestmark = pytest.mark.nats

PAYLOADS_PER_CHANNEL = 30
PART_HEADERS = [
    "",
    "x",
    "a/0/2",
    "a/1/2",
    "a/0/0",
    "a/-1/3",
    "b/0/99999999",
    "a/0/2/3",
    "/0/1",
    "a/9" + "9" * 50 + "/1",
]
"""Of parts: without meaning, out of order, never complete."""
FLUSH_S_MAX = 10
NOBODY = "nobody"
MUTANTS = (0, 8, 22, 42)
"""22 makes its regular expression give up, 42 makes 16^12 characters of one."""
MUTANTS_S_MAX = 240.0
OBEYED = (DRAIN, CHANGE_ROLE)
"""Orders: whom a sound one reaches does what it says."""


def broken(channel: Channel, golden: bytes) -> st.SearchStrategy[bytes]:
    """Anything at all; the message cut off, flipped, with something put in; and a message that says nonsense."""
    position = st.integers(0, max(0, len(golden) - 1))
    flipped = st.builds(
        lambda at, bit: golden[:at] + bytes([golden[at] ^ (1 << bit)]) + golden[at + 1 :], position, st.integers(0, 7)
    )
    nonsense = strategy(channel.message).map(pack)
    stuffed = st.builds(lambda at, extra: golden[:at] + extra + golden[at:], position, st.binary(max_size=20))
    return st.one_of(st.binary(max_size=300), position.map(lambda at: golden[:at]), flipped, stuffed, nonsense)


def payloads(channel: Channel) -> list[bytes]:
    golden = (GOLDEN / f"{channel.message.__name__}.msgpack").read_bytes()
    made: list[bytes] = [b"", golden]

    @settings(
        max_examples=PAYLOADS_PER_CHANNEL, database=None, derandomize=True, suppress_health_check=list(HealthCheck)
    )
    @given(broken(channel, golden))
    def collect(payload: bytes) -> None:
        made.append(payload)

    collect()
    return made


def subjects(channel: Channel, ids: dict[str, list[str]]) -> Iterator[tuple[str, dict[str, str]]]:
    """The channel's subject with each combination of ids that exist and one that does not, and those ids."""
    choices = [[(part, value) for value in [*ids.get(part, []), NOBODY]] for part in channel.parts]
    prefix = "$KV." if channel.delivery is Delivery.KEY_VALUE else ""
    for combination in itertools.product(*choices):
        named = dict(combination)
        yield prefix + PLACEHOLDER.sub(lambda found, named=named: named[found[1]], channel.subject), named


def addressed(payload: bytes, channel: Channel, ids: dict[str, str]) -> bytes:
    """A payload that can be read says the ids of the subject that it is sent to: else nobody would look into it. Only
    what a worker or router says of itself stays forged: nobody is to believe it.
    """
    if channel.delivery in (Delivery.EVENT, Delivery.KEY_VALUE) and NOBODY not in ids.values():
        return payload
    try:
        message: Any = unpack(payload, channel.message)
        return pack(msgspec.structs.replace(message, **ids))
    except BadMessage:
        return payload


async def router_id_of(system: System) -> str:
    """What the router calls itself on the bus."""
    heard: list[RequestsFinished] = []
    bus = await connect_nats(system.nats_url, name="test")
    await bus.subscribe(REQUESTS_FINISHED, lambda told, _envelope: heard.append(told))
    assert well(system)
    while not heard:
        await bus.flush(SOON_S_MAX)
    await bus.close()
    return heard[0].router_id


def well(system: System) -> bool:
    body = {"model": "baton-tiny", "prompt": "Is anybody there?", "max_tokens": 4}
    answers = [system.http.post("/v1/completions", json=body) for _ in range(8)]
    return {answer.status_code for answer in answers} == {200}


async def test_nothing_that_is_published_ends_a_process(simulated: System):
    alive = {process.pid for process in simulated.processes()}
    ids = {"worker_id": ["prefill-1", "decode-2"], "router_id": [await router_id_of(simulated)], "role": ["fleet"]}
    stranger = await nats.connect(simulated.nats_url)

    for channel in CHANNELS.values():
        reached = {} if channel in OBEYED else ids
        for (subject, named), payload in itertools.product(subjects(channel, reached), payloads(channel)):
            await stranger.publish(subject, addressed(payload, channel, named))
        for (subject, _named), header in itertools.product(subjects(channel, reached), PART_HEADERS):
            await stranger.publish(subject, b"part", headers={"Baton-Part": header} if header else None)
        await stranger.flush(FLUSH_S_MAX)
    await stranger.close()

    until(lambda: well(simulated), "requests work")
    until(lambda: simulated.exact_indexes() == 4, "all indexes are exact")
    workers = {"prefill-1", "prefill-2", "decode-1", "decode-2"}
    await asyncio.to_thread(until, lambda: workers <= simulated.fleet().keys(), "the fleet is known")
    assert simulated.metrics().sum("baton_bus_bad_messages_total") > PAYLOADS_PER_CHANNEL
    assert simulated.fleet_metrics().sum("baton_bus_bad_messages_total") > PAYLOADS_PER_CHANNEL
    assert alive <= {process.pid for process in simulated.processes()}, simulated.report_text()


class Hostile(FakeWorker):
    """Sends a mutated tokenizer and template."""

    def __init__(self, bus: Bus, number: int) -> None:
        name = f"mutant-{number}"
        asset = msgspec.structs.replace(Mutant(number).asset(), worker_id=name)
        super().__init__(bus, name, models=(name,), revision=name, asset=asset)
        self.was_asked = False

    async def _on_tokenizer(self, ask: AskTokenizer, envelope: Envelope) -> TokenizerAsset:
        self.was_asked = True
        return await super()._on_tokenizer(ask, envelope)


async def test_mutated_tokenizers_and_templates_end_no_router(simulated: System):
    """Each is of a worker of its own. Requests for its model are tokenized and rendered with it, if it passes."""
    alive = {process.pid for process in simulated.processes()}
    bus = await connect_nats(simulated.nats_url, name="test")
    workers = [Hostile(bus, number) for number in MUTANTS]
    for worker in workers:
        await worker.join()
    try:
        async with asyncio.timeout(MUTANTS_S_MAX):
            while not all(worker.was_asked for worker in workers):
                for worker in workers:
                    await worker.report()
                assert await asyncio.to_thread(well, simulated)
            for worker, text in itertools.product(workers, PROMPTS):
                await worker.report()
                await asyncio.to_thread(ask_both_ways, simulated, worker.worker_id, text)
    finally:
        for worker in workers:
            await (await bus.key_value_store(WORKER_RECORDS)).delete(worker.worker_id)
        await bus.close()

    until(lambda: well(simulated), "requests work")
    until(lambda: simulated.exact_indexes() == 4, "all indexes are exact")
    assert alive <= {process.pid for process in simulated.processes()}, simulated.report_text()


def ask_both_ways(system: System, model: str, text: str) -> None:
    for path, fields in (
        ("/v1/completions", {"prompt": text}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}),
    ):
        answer = system.http.post(path, json={"model": model, "max_tokens": 4, **fields})
        assert answer.status_code == 200, answer.text
