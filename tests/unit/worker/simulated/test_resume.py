"""Resuming an answer on another simulated engine gives the tokens of one engine."""

from __future__ import annotations

import asyncio
import json

import pytest

from services.worker.engines.port import CURRENT_LEG, Leg, LegInput
from services.worker.engines.simulated.core.settings import SimulationSettings
from services.worker.engines.simulated.engine import SimulatedEngine, SimulatedModel
from services.worker.engines.simulated.model import SimulatedTokenizer
from services.worker.legs.asgi_call import AsgiCall
from services.worker.tiny_model import ensure_tiny_tokenizer
from shared.contracts.inference import LegKind
from shared.contracts.kv_exchange import LegOrder
from tests.support.builders import start_leg
from tests.unit.worker.simulated.builders import INSTANT

PROMPT = "The station master kept three clocks on the wall. " * 8
TOKENS = 12
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return SimulatedTokenizer(ensure_tiny_tokenizer(tmp_path_factory.mktemp("models")))


@pytest.fixture
async def engines(tokenizer, tmp_path):
    settings = SimulationSettings(**{"kv_blocks": 512, "max_model_len": 2048, **INSTANT})
    opened = [SimulatedEngine(settings, SimulatedModel(directory=tmp_path), tokenizer, 256) for _ in range(2)]
    yield opened
    for engine in opened:
        await engine.close(1.0)


class Frames:
    """What a router would get: pieces of the answer, each with its tokens."""

    def __init__(self) -> None:
        self.status = 0
        self.pieces: list[tuple[bytes, list[int]]] = []
        self.cached: list[int] = []

    def head(self, status, _content_type) -> None:
        self.status = status

    def data(self, data, token_ids=(), _joined=None, cached_tokens=None) -> None:
        self.pieces.append((data, list(token_ids)))
        self.cached += [cached_tokens] if cached_tokens is not None else []

    async def drain(self) -> None:
        return

    @property
    def body(self) -> bytes:
        return b"".join(data for data, _ in self.pieces)

    @property
    def tokens(self) -> list[int]:
        return [token for _, tokens in self.pieces for token in tokens]


async def no_server_error() -> None:
    return


async def serve(engine, path, fields, *, resume=None, cached=None, kind=LegKind.AGGREGATED, order=None):
    if path == COMPLETIONS and "logprobs" in fields:
        fields = {**fields, "logprobs": 1}
    body = {"stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True, "max_tokens": TOKENS}
    if path == RESPONSES:
        body = {"stream": True, "ignore_eos": True, "max_output_tokens": TOKENS}
    elif path == MESSAGES and "stop" in fields:
        fields = {"stop_sequences": fields["stop"]}
    chat = [{"role": "user", "content": PROMPT}]
    asked = {COMPLETIONS: {"prompt": PROMPT}, RESPONSES: {"input": chat}}.get(path, {"messages": chat})
    raw = json.dumps({**body, **asked, **fields}).encode()
    start = start_leg(request_id="q", kind=kind, path=path, body=raw, resume=None if resume is None else b"")
    given = LegInput(
        kind=kind, path=path, request_id="q", answer_id="a", resume=resume, resume_cached_tokens=cached, order=order
    )
    frames = Frames()
    call = AsgiCall(start, raw, frames, no_server_error)
    await asyncio.create_task(_call(engine, call, given))
    return frames, call.result


async def _call(engine, call, given) -> None:
    CURRENT_LEG.set(Leg(given, call.result))
    await call.run(engine.app)
    call.finish()


def events(body: bytes) -> list:
    """Without what depends on the moment."""
    return [_settled(part.rpartition(b"data: ")[2]) for part in body.split(b"\n\n") if part]


def _settled(event: bytes):
    if event == b"[DONE]":
        return "done"
    parsed = json.loads(event)
    parsed.pop("created", None)
    parsed.get("response", {}).pop("created_at", None)
    return parsed


def joined(frames: list[tuple[bytes, list[int]]]) -> tuple[bytes, list[int]]:
    return b"".join(data for data, _ in frames), [token for _, said in frames for token in said]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, MESSAGES, RESPONSES])
@pytest.mark.parametrize(
    "fields",
    [{}, {"logprobs": True}, {"stop": ["qqqqqqqqqqqqqqqqqqqqqqqq"]}, {"min_tokens": TOKENS, "ignore_eos": False}],
)
async def test_an_answer_cut_anywhere_resumes_unchanged(engines, path, fields):
    """Held-back text, logprobs' offsets and the usage are those of one answer; the id is the request's."""
    whole, _ = await serve(engines[0], path, fields)
    assert len(whole.tokens) == TOKENS
    (cached,) = whole.cached
    for cut in range(1, len(whole.pieces)):
        data, tokens = joined(whole.pieces[:cut])

        rest, result = await serve(engines[1], path, fields, resume=tokens, cached=cached)

        assert events(data + rest.body) == events(whole.body)
        assert tokens + rest.tokens == whole.tokens
        assert result.completion_tokens == TOKENS


async def test_a_stop_string_across_the_cut_ends_the_answer(engines):
    plain, _ = await serve(engines[0], COMPLETIONS, {})
    texts = [json.loads(data.removeprefix(b"data: "))["choices"][0]["text"] for data, _ in plain.pieces[:7]]
    fields = {"stop": [texts[5][1:] + texts[6]]}
    whole, _ = await serve(engines[0], COMPLETIONS, fields)
    assert len(whole.tokens) == 7

    data, tokens = joined(whole.pieces[:6])
    rest, result = await serve(engines[1], COMPLETIONS, fields, resume=tokens, cached=whole.cached[0])

    assert events(data + rest.body) == events(whole.body)
    assert result.finish_reason == "stop"


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_a_finish_reason_leaves_with_the_end_of_the_stream(engines, path):
    whole, _ = await serve(engines[0], path, {})

    *before, (last, _) = whole.pieces

    assert events(last)[0]["choices"][0]["finish_reason"] == "length"
    assert last.endswith(b"data: [DONE]\n\n")
    assert all(event["choices"][0]["finish_reason"] is None for data, _ in before for event in events(data))


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, MESSAGES])
async def test_an_answer_with_all_its_tokens_gets_only_its_end(engines, path):
    whole, _ = await serve(engines[0], path, {})

    rest, result = await serve(engines[1], path, {}, resume=whole.tokens)

    assert events(rest.body) == events(whole.body)[-2:]
    assert rest.tokens == []
    assert (result.finish_reason, result.completion_tokens) == ("length", TOKENS)
    assert engines[1].load().generation_tokens_total == 0


async def test_a_prefill_leg_reads_the_resumed_tokens_as_part_of_its_prompt(engines):
    tokens = list(range(100, 164))

    _frames, result = await serve(
        engines[0], COMPLETIONS, {}, resume=tokens, kind=LegKind.PREFILL, order=LegOrder(offer=True, offer_id="l")
    )

    assert result.transfer_report.prompt_tokens == result.prompt_tokens + len(tokens)
    assert result.completion_tokens == 1


async def test_tokens_out_of_vocabulary_are_refused(engines):
    frames, _ = await serve(engines[0], COMPLETIONS, {}, resume=[4_000_000_000])

    assert frames.status == 400
