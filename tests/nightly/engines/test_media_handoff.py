"""Chats with pictures on real engines, with tiny random weights, behind a real router.

The decode worker's model sees nothing: an answer for which it ran its encoder would be another one.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from PIL import Image

from services.router.decisions.decision import Decision
from services.router.service import Router
from services.router.settings import Settings
from services.router.telemetry.tracing import Tracing
from services.router.tokenize.rendered_prompts import REACHES_LAST_BLOCK, Outcome
from shared.bus.nats_bus import connect_nats
from shared.runtime.clock import SystemClock
from tests.support.nats_server import NatsServer
from tests.support.vision_models import VISION_FAMILIES, VisionFamily, blind
from tests.support.worker_processes import ready_workers, start_worker
from tests.unit.router.world import CHAT, FakeConnection, HttpResponse, parse

pytestmark = [pytest.mark.vllm, pytest.mark.nats, pytest.mark.timeout(1200)]

MODEL = "eyes"
PREFILL, DECODE = "p1", "d1"
BLOCK = 32
QUESTION = "What is it that we see here, and who has made it? " * 8
READY_S_MAX = 60.0


def picture(seed: str, side: int = 32) -> dict[str, Any]:
    """As a part of a message: a square of noise with so many pixels a side."""
    image, file = Image.frombytes("RGB", (side, side), random.Random(seed).randbytes(3 * side * side)), io.BytesIO()
    image.save(file, "PNG")
    url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": url}}


@pytest.fixture(scope="module", params=VISION_FAMILIES)
def family(request: pytest.FixtureRequest) -> VisionFamily:
    one = VISION_FAMILIES[request.param]
    if one.needs:
        pytest.importorskip(one.needs, reason=f"the processor needs {one.needs}")
    return one


@pytest.fixture(scope="module")
def nats_url(family: VisionFamily, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of a prefill worker, and of a decode worker that cannot see."""
    folder = tmp_path_factory.mktemp("media")
    models = [family.make(folder / worker_id) for worker_id in (PREFILL, DECODE)]
    blind(models[1], family.encoder)
    with NatsServer(folder, has_buckets=True) as nats:
        common = {"served_model_name": MODEL, "max_model_len": "2000", "engine_args": family.engine_args}
        workers = [
            start_worker(nats.url, worker_id, folder, role=role, cpu_cores=core, model=str(model), **common)
            for worker_id, role, core, model in (
                (PREFILL, "prefill", "0", models[0]),
                (DECODE, "decode", "1", models[1]),
            )
        ]
        with ready_workers(nats.url, *workers) as (prefill, decode):
            assert prefill.record is not None
            assert decode.record is not None
            assert prefill.record.renders
            assert prefill.record.fingerprint == decode.record.fingerprint
            yield nats.url


class Asker:
    """A client of a router in this process."""

    def __init__(self, router: Router) -> None:
        self.router = router

    async def ask(self, *parts: dict[str, Any], **fields: Any) -> tuple[HttpResponse, str]:
        """The response and its text."""
        body = {
            "model": MODEL,
            "messages": [{"role": "user", "content": [*parts]}],
            "temperature": 0,
            "ignore_eos": True,
            "max_tokens": 16,
            **fields,
        }
        connection = FakeConnection()
        request = self.router.edge.admit(connection, CHAT, [], http11=True, keep=True)
        connection.http_request = request
        request.upload.add(json.dumps(body).encode())
        request.upload.complete = True
        await self.router.edge.serve(request)
        response = parse(connection.written)
        assert response.status == 200, response.body
        return response, msgspec.json.decode(response.body)["choices"][0]["message"]["content"]

    async def alone(self, *parts: dict[str, Any]) -> str:
        """What the worker that sees answers from an empty cache."""
        where = {"mode": "aggregated", "decode_worker": PREFILL}
        return (await self.ask(*parts, baton=where, cache_salt="alone"))[1]

    @property
    def decision(self) -> Decision:
        return self.router.decisions.log.newest_first()[0]

    @property
    def outcomes(self) -> dict[str, int]:
        return {str(outcome): count for outcome, count in self.router.prompts.rendered.counts.items() if count}


@asynccontextmanager
async def running_router(nats_url: str) -> AsyncIterator[Router]:
    bus = await connect_nats(nats_url, name="router", connect_s_max=30.0)
    router = Router(Settings(log_requests=False, force_placement="anyone"), bus, SystemClock(), Tracing())
    await router.open()
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(run(router))
        try:
            async with asyncio.timeout(READY_S_MAX):
                while sum(view.ready for view in router.fleet.cluster.workers.values()) < 2:
                    await asyncio.sleep(0.05)
            yield router
        finally:
            running.cancel()
            await router.close()
            await bus.close()


async def run(router: Router) -> None:
    async with asyncio.TaskGroup() as tasks:
        router.start(tasks)


@pytest.fixture
async def asker(nats_url: str) -> AsyncIterator[Asker]:
    async with running_router(nats_url) as router:
        yield Asker(router)


async def test_a_decode_worker_answers_about_a_picture_that_it_has_not_seen(asker: Asker):
    answers = []
    for seed in ("one", "two", "three"):
        parts = picture(seed), {"type": "text", "text": QUESTION}

        response, said = await asker.ask(*parts)

        assert response.headers["x-baton-mode"] == "disaggregated"
        decision = asker.decision
        assert decision.exact
        assert decision.request.prompt_tokens == decision.counted_prompt_tokens > 2 * BLOCK
        assert said == await asker.alone(*parts)
        answers.append(said)
    assert len(set(answers)) == len(answers), "the answers do not depend on the pictures"


async def test_pictures_between_texts_share_the_prefix_before_them(family: VisionFamily, asker: Asker):
    if family.pictures < 2:
        pytest.skip("its picture stands before all text")
    said = []
    for seed in ("four", "five"):
        parts = (
            {"type": "text", "text": QUESTION},
            picture("common"),
            {"type": "text", "text": "This one, or that one?"},
            picture(seed),
            {"type": "text", "text": QUESTION},
        )

        _response, answer = await asker.ask(*parts)

        decision = asker.decision
        assert decision.exact
        assert decision.request.prompt_tokens == decision.counted_prompt_tokens
        assert answer == await asker.alone(*parts)
        said.append(answer)
        await asyncio.sleep(2.0)  # For KV events.
    assert said[0] != said[1]
    assert decision.result.cached_tokens + decision.result.fetched_tokens > decision.request.prompt_tokens // 3


async def test_a_long_prompt_with_a_large_picture_is_handed_over_while_it_is_computed(asker: Asker):
    parts = picture("large", side=800), {"type": "text", "text": 10 * QUESTION}

    response, said = await asker.ask(*parts)

    assert response.headers["x-baton-handoff"] == "streamed"
    assert asker.decision.exact
    assert said == await asker.alone(*parts)


async def test_another_question_about_a_picture_finds_its_blocks(asker: Asker):
    seen = picture("seen")
    await asker.ask(seen, {"type": "text", "text": QUESTION})
    tokens = asker.decision.request.prompt_tokens
    await asyncio.sleep(2.0)  # KV events reach the router at most this late; without them it would predict less.

    parts = seen, {"type": "text", "text": QUESTION + "And what is behind it?"}
    _response, said = await asker.ask(*parts)

    decision = asker.decision
    assert decision.result.cached_tokens + decision.result.fetched_tokens >= tokens // BLOCK * BLOCK - BLOCK
    assert decision.cached_tokens >= decision.result.cached_tokens
    assert said == await asker.alone(*parts)
    assert set(asker.outcomes) == {Outcome.RENDERED}


async def test_a_picture_in_the_last_block_is_served_by_one_worker(asker: Asker):
    response, _said = await asker.ask(picture("short"), {"type": "text", "text": "What?"})

    assert response.headers["x-baton-mode"] == "aggregated"
    assert asker.decision.result.why == REACHES_LAST_BLOCK
    assert asker.decision.counted_prompt_tokens < BLOCK
