"""The simulated engine behind its port: OpenAI responses, the leg's result, events and load."""

import asyncio
import contextlib
import json
from array import array

import numpy as np
import pytest

from connector.messages import EngineCall, Peer, StartFetch
from connector.transfer.agent import TransferFailed
from services.worker.engines.port import CURRENT_LEG, EngineDead, Identity, Leg, LegInput
from services.worker.engines.simulated.core.settings import SimulationSettings
from services.worker.engines.simulated.engine import (
    SimulatedModel,
    open_simulated_engine,
    simulation_settings,
    start_engine,
)
from services.worker.engines.simulated.kv_exchange import TcpAgent
from services.worker.kv_events import HeldBlocks
from services.worker.settings import Settings
from services.worker.tiny_model import ensure_tiny_tokenizer
from shared.contracts.ids import Epoch, WorkerId
from shared.contracts.inference import LegKind
from shared.contracts.kv_events import block_hash64
from shared.contracts.kv_exchange import FetchKv, KvSource, LegOrder, pack_full_hashes
from shared.runtime.settings import CommonSettings
from tests.support.kv_messages import blocks_of
from tests.unit.worker.simulated.builders import INSTANT

PROMPT = "The station master kept three clocks on the wall. " * 8


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return ensure_tiny_tokenizer(tmp_path_factory.mktemp("models"))


@contextlib.asynccontextmanager
async def running(directory, **changes):
    values = {"kv_blocks": 512, "max_model_len": 2048, **INSTANT, **changes}
    engine = await open_simulated_engine(SimulationSettings(**values), SimulatedModel(directory=directory))
    try:
        yield engine
    finally:
        await engine.close(1.0)


@pytest.fixture
async def engine(directory):
    async with running(directory) as opened:
        yield opened


class Answer:
    def __init__(self):
        self.status, self.content_type, self.pieces = 0, "", []

    @property
    def body(self):
        return b"".join(self.pieces)

    def json(self):
        return json.loads(self.body)

    def events(self):
        parts = self.body.decode().split("\n\n")
        assert parts.pop() == ""
        assert parts.pop() == "data: [DONE]"
        return [json.loads(part.removeprefix("data: ")) for part in parts]


async def call(engine, path, body, *, leg=None, method="POST", on_piece=lambda: None):
    answer, raw = Answer(), body if isinstance(body, bytes) else json.dumps(body).encode()
    requests = iter([raw[: len(raw) // 2], raw[len(raw) // 2 :]])
    halves = [{"type": "http.request", "body": next(requests), "more_body": more} for more in (True, False)]

    async def receive():
        return halves.pop(0)

    async def send(message):
        if message["type"] == "http.response.start":
            answer.status, answer.content_type = message["status"], dict(message["headers"])[b"content-type"].decode()
        else:
            answer.pieces.append(message["body"])
            on_piece()

    token = CURRENT_LEG.set(leg)
    try:
        await engine.app({"type": "http", "method": method, "path": path}, receive, send)
    finally:
        CURRENT_LEG.reset(token)
    return answer


async def complete(engine, leg=None, **fields):
    return await call(engine, "/v1/completions", {"prompt": PROMPT, "ignore_eos": True, **fields}, leg=leg)


async def chat(engine, leg=None, **fields):
    body = {"messages": [{"role": "user", "content": PROMPT}], "ignore_eos": True, **fields}
    return await call(engine, "/v1/chat/completions", body, leg=leg)


def new_leg(**values):
    return Leg(LegInput(request_id="r1", **values))


async def serve_leg(engine, kind, body, order, **values):
    leg = new_leg(kind=kind, order=order, **values)
    return await call(engine, "/v1/completions", body, leg=leg), leg.result


def on_one_bus(*engines):
    """Every message comes to whom it is for, as the engines' workers would see to; answers how to call an engine."""
    by_id = {engine._core.settings.worker_id: engine for engine in engines}
    carrying = set()

    def carry(notifications):
        for field, whom in (("leases", "worker_id"), ("grants", "reader_id"), ("releases", "worker_id")):
            for message in getattr(notifications, field):
                task = asyncio.create_task(deliver(by_id[getattr(message, whom)], EngineCall(**{field: [message]})))
                carrying.add(task)
                task.add_done_callback(carrying.discard)

    async def deliver(engine, order):
        carry(await engine.exchange.call(order))

    for engine in engines:
        engine.exchange.on_notifications(carry)
    return deliver


async def handshake(*engines):
    deliver = on_one_bus(*engines)
    told = [(await engine.exchange.call(EngineCall(describe=True))).handshake for engine in engines]
    for engine in engines:
        peers = [
            Peer(handshake=one, clock_ahead_s=0.0) for one in told if one.worker_id != engine._core.settings.worker_id
        ]
        await deliver(engine, EngineCall(peers=peers))
    return deliver


async def test_a_streamed_completion_equals_a_whole_one(engine):
    whole = (await complete(engine, max_tokens=12)).json()
    streamed = await complete(engine, max_tokens=12, stream=True)
    events = streamed.events()

    assert streamed.content_type.startswith("text/event-stream")
    assert "".join(event["choices"][0]["text"] for event in events) == whole["choices"][0]["text"]
    assert [event["choices"][0]["finish_reason"] for event in events] == [None] * 11 + ["length"]
    assert {event["object"] for event in events} == {whole["object"]} == {"text_completion"}
    assert whole["usage"]["completion_tokens"] == 12


async def test_a_streamed_chat_equals_a_whole_one_and_begins_with_the_role(engine):
    whole = (await chat(engine, max_tokens=7)).json()
    events = (await chat(engine, max_tokens=7, stream=True)).events()

    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    text = "".join(event["choices"][0]["delta"]["content"] for event in events)
    assert text == whole["choices"][0]["message"]["content"]
    assert events[-1]["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"] == "length"


async def test_an_answer_sent_back_makes_the_same_tokens_again(engine):
    answer = (await complete(engine, max_tokens=40)).json()["choices"][0]["text"]
    again = await complete(engine, prompt=PROMPT + answer + " more", max_tokens=1)

    prompt_tokens = again.json()["usage"]["prompt_tokens"]
    cached = again.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached >= prompt_tokens - 2 * 32


async def test_usage_comes_last_and_counts_cached_tokens(engine):
    await complete(engine, max_tokens=1)
    options = {"include_usage": True}
    last = (await complete(engine, max_tokens=3, stream=True, stream_options=options)).events()[-1]
    each = await complete(engine, max_tokens=3, stream=True, stream_options={**options, "continuous_usage_stats": True})

    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 3
    assert last["usage"]["prompt_tokens_details"]["cached_tokens"] == (last["usage"]["prompt_tokens"] - 1) // 32 * 32
    assert [event["usage"]["completion_tokens"] for event in each.events()] == [1, 2, 3, 3]


@pytest.mark.parametrize("streamed", [False, True])
async def test_stop_strings_end_the_answer_before_them(engine, streamed):
    words = (await complete(engine, max_tokens=20)).json()["choices"][0]["text"].split(" ")
    leg = new_leg()

    answer = await complete(engine, leg, max_tokens=20, stop=["never", " " + words[5]], stream=streamed)

    choices = [event["choices"][0] for event in answer.events()] if streamed else answer.json()["choices"]
    assert "".join(choice["text"] for choice in choices) == " ".join(words[:5])
    assert (choices[-1]["finish_reason"], choices[-1]["stop_reason"]) == ("stop", " " + words[5])
    assert leg.result.finish_reason == "stop"
    assert engine.load().kv_tokens_used == 0


async def test_a_stop_token_is_counted_and_not_shown(engine):
    ids = engine._tokenizer
    words = (await complete(engine, max_tokens=9)).json()["choices"][0]["text"].split(" ")
    token = ids.encode(" " + words[4], special=False)[0]

    answer = (await complete(engine, max_tokens=9, stop_token_ids=[token])).json()

    assert answer["choices"][0]["text"] == " ".join(words[:4])
    assert answer["choices"][0]["stop_reason"] == token
    assert answer["usage"]["completion_tokens"] == 4


async def test_several_prompts_and_choices_are_numbered_prompt_by_prompt(engine):
    answer = (await complete(engine, prompt=["One", "Two"], n=2, max_tokens=3)).json()
    events = (await complete(engine, prompt=["One", "Two"], n=2, max_tokens=3, stream=True)).events()

    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    for choice in answer["choices"]:
        pieces = [e["choices"][0]["text"] for e in events if e["choices"][0]["index"] == choice["index"]]
        assert "".join(pieces) == choice["text"]
    assert answer["choices"][0]["text"] != answer["choices"][2]["text"]
    assert answer["usage"]["completion_tokens"] == 12


async def test_prompts_may_be_token_ids(engine):
    one = (await complete(engine, prompt=[5, 6, 7], max_tokens=2)).json()
    two = (await complete(engine, prompt=[[5, 6, 7], [8, 9]], max_tokens=2)).json()

    assert one["usage"]["prompt_tokens"] == 3
    assert two["usage"]["prompt_tokens"] == 5
    assert two["choices"][0]["text"] == one["choices"][0]["text"]


async def test_echo_and_logprobs_include_the_prompt(engine):
    answer = (await complete(engine, prompt="Hello there", echo=True, logprobs=1, max_tokens=2)).json()
    streamed = (await complete(engine, prompt="Hello there", echo=True, max_tokens=2, stream=True)).events()
    choice = answer["choices"][0]
    logprobs = choice["logprobs"]

    assert choice["text"].startswith("Hello there")
    assert "".join(logprobs["tokens"]).endswith(choice["text"])
    assert len(logprobs["tokens"]) == len(logprobs["token_logprobs"]) == len(logprobs["text_offset"])
    assert "".join(event["choices"][0]["text"] for event in streamed) == choice["text"]


async def test_chat_logprobs_and_prompt_logprobs_have_their_shapes(engine):
    answer = (await chat(engine, logprobs=True, top_logprobs=2, max_tokens=2, prompt_logprobs=0)).json()["choices"][0]

    assert [entry["token"] for entry in answer["logprobs"]["content"]] == [
        " " + word for word in answer["message"]["content"].split(" ")[1:]
    ]
    assert answer["prompt_logprobs"][0] is None


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/v1/completions", b"{", 400, None),
        ("/v1/completions", b"\xff\xfe", 400, None),
        ("/v1/completions", b"[]", 400, None),
        ("/v1/completions", b"[" * 100_000, 400, None),
        ("/v1/completions", {"prompt": 5}, 400, "prompt"),
        ("/v1/completions", {"prompt": []}, 400, "prompt"),
        ("/v1/completions", {"prompt": [[]]}, 400, "prompt"),
        ("/v1/completions", {"prompt": ["a", 5]}, 400, "prompt"),
        ("/v1/completions", {"prompt": [-1]}, 400, "prompt"),
        ("/v1/completions", {"prompt": [10**9]}, 400, "prompt"),
        ("/v1/completions", {"prompt": "word " * 3000}, 400, "input_tokens"),
        ("/v1/completions", {}, 400, "prompt"),
        ("/v1/completions", {"prompt": "a", "max_tokens": 0}, 400, "max_tokens"),
        ("/v1/completions", {"prompt": "a", "n": "two"}, 400, "n"),
        ("/v1/completions", {"prompt": "a", "n": 10**6}, 400, "n"),
        ("/v1/completions", {"prompt": "a", "temperature": -1}, 400, "temperature"),
        ("/v1/completions", {"prompt": "a", "top_p": 0}, 400, "top_p"),
        ("/v1/completions", {"prompt": "a", "stop": [""]}, 400, "stop"),
        ("/v1/completions", {"prompt": "a", "stream_options": {"include_usage": True}}, 400, "stream_options"),
        ("/v1/completions", {"prompt": "a", "min_tokens": 9, "max_tokens": 5}, 400, "min_tokens"),
        ("/v1/completions", {"prompt": "a", "model": "nobody"}, 404, "model"),
        ("/v1/chat/completions", {"messages": []}, 400, "messages"),
        ("/v1/chat/completions", {"messages": [{"role": "alien", "content": "x"}]}, 400, "messages"),
        ("/v1/chat/completions", {"messages": [{}]}, 400, "messages"),
        ("/v1/chat/completions", {"messages": "hello"}, 400, "messages"),
        ("/v1/chat/completions", {"messages": [{"role": "user"}], "top_logprobs": 3}, 400, "top_logprobs"),
    ],
)
async def test_bad_input_gets_vllms_errors(engine, path, body, status, param):
    answer = await call(engine, path, body)

    assert answer.status == status
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["code"], error["param"]) == (status, param)
    assert engine.load().kv_tokens_used == 0


async def test_models_health_and_unknown_paths(engine):
    models = await call(engine, "/v1/models", b"", method="GET")

    assert [card["id"] for card in models.json()["data"]] == ["baton-tiny"]
    assert (await call(engine, "/health", b"", method="GET")).status == 200
    assert (await call(engine, "/v1/nothing", b"")).status == 404
    assert (await call(engine, "/v1/completions", b"", method="GET")).status == 405


async def test_a_disaggregated_request_answers_like_an_aggregated_one(engine, directory):
    body = {"prompt": PROMPT, "max_tokens": 16, "stream": True, "stop": ["zzz"], "ignore_eos": True}
    body["stream_options"] = {"include_usage": True}
    async with running(directory, worker_id="decoder") as decoder:
        await handshake(engine, decoder)
        alone = await complete(engine, max_tokens=16)
        warm = alone.json()["usage"]["prompt_tokens"]
        _, prefilled = await serve_leg(engine, LegKind.PREFILL, body, LegOrder(offer=True))
        offer = prefilled.transfer_report.offer
        cached = prefilled.cached_tokens
        answer, decoded = await serve_leg(
            decoder, LegKind.DECODE, body, LegOrder(take=offer), prefill_cached_tokens=cached
        )
        events = answer.events()

        text = "".join(event["choices"][0]["text"] for event in events[:-1])
        assert text == alone.json()["choices"][0]["text"]
        assert (prefilled.completion_tokens, prefilled.finish_reason) == (1, "length")
        assert prefilled.cached_tokens == decoded.received_tokens == (warm - 1) // 32 * 32
        assert decoded.received_bytes == decoded.received_tokens * 4096
        assert decoded.cached_tokens == 0
        assert events[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] == prefilled.cached_tokens
        assert decoder.load().received_tokens_total == decoded.received_tokens
        assert decoder.load().computed_tokens_total == warm - decoded.received_tokens
        assert (decoded.transfer_report.fetched_tokens, decoded.transfer_report.prompt_tokens) == (
            decoded.received_tokens,
            warm,
        )


@pytest.mark.parametrize("transfer", ["memory", "tcp", "nixl"])
async def test_every_transfer_agent_moves_the_right_bytes(directory, transfer):
    if transfer == "nixl":
        pytest.importorskip("nixl")
    body = {"prompt": PROMPT, "max_tokens": 16, "ignore_eos": True}
    with_it = {"transfer": transfer}
    async with (
        running(directory, worker_id="p", **with_it) as prefiller,
        running(directory, worker_id="d", **with_it) as decoder,
    ):
        await handshake(prefiller, decoder)
        _, prefilled = await serve_leg(prefiller, LegKind.PREFILL, body, LegOrder(offer=True))
        answer, decoded = await serve_leg(decoder, LegKind.DECODE, body, LegOrder(take=prefilled.transfer_report.offer))
        alone = await complete(prefiller, max_tokens=16)

    assert decoded.transfer_report.fetched_tokens == (decoded.prompt_tokens - 1) // 32 * 32
    assert answer.json()["choices"][0]["text"] == alone.json()["choices"][0]["text"]


async def test_a_tcp_reader_gets_registered_memory_only(directory):
    async with running(directory, worker_id="p", transfer="tcp") as engine:
        told = (await engine.exchange.call(EngineCall(describe=True))).handshake
        reader = TcpAgent("reader", "127.0.0.1")
        name = reader.connect(told.ranks[0].agent).name()
        room, secret = array("q", [7]), array("q", [42])
        here = np.array([[room.buffer_info()[0], 8, 0]], dtype=np.uint64)
        there = np.array([[secret.buffer_info()[0], 8, 0]], dtype=np.uint64)
        with pytest.raises(TransferFailed):
            reader.read(name, there, here, device="cpu", remote_device="cpu")
        reader.close()

    assert room[0] == 7


async def test_a_streamed_handoff_reports_prefill_cached_tokens(directory):
    slow = {"prefill_tokens_per_s": 2000.0, "max_num_batched_tokens": 64}
    body = {"prompt": PROMPT, "max_tokens": 5, "ignore_eos": True}
    async with running(directory, worker_id="p", **slow) as prefiller, running(directory, worker_id="d") as decoder:
        await handshake(prefiller, decoder)
        await complete(prefiller, prompt=PROMPT[: len(PROMPT) // 2], max_tokens=1)
        source = KvSource(worker_id=WorkerId("p"), epoch=Epoch(0), follow=True)
        legs = (
            serve_leg(decoder, LegKind.DECODE, body, LegOrder(sources=[source])),
            serve_leg(prefiller, LegKind.PREFILL, body, None),
        )
        (answer, decoded), (_, prefilled) = await asyncio.gather(*legs)
        alone = await complete(prefiller, max_tokens=5)

    assert prefilled.cached_tokens > 0
    assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == prefilled.cached_tokens
    assert answer.json()["choices"][0]["text"] == alone.json()["choices"][0]["text"]
    assert decoded.transfer_report.recomputed_tokens <= 32
    assert decoded.transfer_report.reads[0].followed


async def test_damaged_kv_changes_the_answer(engine, directory):
    body = {"prompt": PROMPT, "max_tokens": 16, "ignore_eos": True}
    async with running(directory, worker_id="decoder") as decoder:
        await handshake(engine, decoder)
        whole = (await complete(engine, max_tokens=16)).json()["choices"][0]["text"]
        _, prefilled = await serve_leg(engine, LegKind.PREFILL, body, LegOrder(offer=True))
        offer = prefilled.transfer_report.offer
        engine._core.cache.contents[blocks_of(offer)[1]] ^= 1
        answer, decoded = await serve_leg(decoder, LegKind.DECODE, body, LegOrder(take=offer))

    assert decoded.received_tokens > 0
    assert answer.json()["choices"][0]["text"] != whole


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_request_below_its_threshold_gets_200_without_tokens(engine, streamed):
    body = {"prompt": PROMPT, "max_tokens": 5, "stream": streamed}

    answer, result = await serve_leg(engine, LegKind.AGGREGATED, body, LegOrder(cache_hit_threshold=0.5))
    warmed = await complete(engine, max_tokens=5)
    warm, _ = await serve_leg(engine, LegKind.AGGREGATED, {**body, "stream": False}, LegOrder(cache_hit_threshold=0.5))

    choice = answer.events()[-1]["choices"][0] if streamed else answer.json()["choices"][0]
    assert (answer.status, choice["text"], choice["finish_reason"]) == (200, "", "cache_threshold")
    assert (result.finish_reason, result.completion_tokens, result.transfer_report.refused) == (
        "cache_threshold",
        0,
        True,
    )
    assert warm.json()["choices"][0]["text"] == warmed.json()["choices"][0]["text"]


async def test_a_fetch_by_command_computes_no_token(engine, directory):
    await complete(engine, max_tokens=1)
    hashes = list(engine._core.cache.hashes())
    async with running(directory, worker_id="other") as other:
        deliver = await handshake(engine, other)
        ended = asyncio.get_running_loop().create_future()
        other.exchange.on_notifications(
            lambda notifications: notifications.fetched and ended.set_result(notifications.fetched[0])
        )
        source = KvSource(worker_id=WorkerId("simulated"), epoch=Epoch(0))
        packed = pack_full_hashes(hashes)
        fetch = FetchKv(worker_id="other", sender_id="simulated", hashes=packed, sources=[source], deadline_s=5.0)
        await deliver(other, EngineCall(fetches=[StartFetch(fetch_id="f1", fetch=fetch)]))
        result = (await ended).result
        answer = await complete(other, max_tokens=4)

        assert (result.held, result.fetched, result.failure) == (0, len(hashes), "")
        assert other.load().computed_tokens_total < answer.json()["usage"]["prompt_tokens"]
        assert (
            answer.json()["choices"][0]["text"] == (await complete(engine, max_tokens=4)).json()["choices"][0]["text"]
        )


async def test_the_legs_result_has_its_costs(directory):
    async with running(directory, prefill_base_s=0.01, decode_base_s=0.001) as engine:
        leg, taken = new_leg(), []
        result = leg.result

        def take():
            taken.extend(result.token_ids)
            result.token_ids = []

        body = {"prompt": PROMPT, "max_tokens": 9, "ignore_eos": True, "stream": True}
        await call(engine, "/v1/completions", body, leg=leg, on_piece=take)
        texts = engine._tokenizer.texts
        whole = await complete(engine, max_tokens=9)

    assert "".join(texts[token] for token in taken) == whole.json()["choices"][0]["text"]
    assert result.completion_tokens == len(taken) == 9
    assert result.prompt_tokens == whole.json()["usage"]["prompt_tokens"]
    assert result.prefill_s >= 0.01
    assert result.first_token_at > 0
    assert result.finish_reason == "length"


async def test_a_cancelled_call_frees_its_blocks(directory):
    async with running(directory, decode_base_s=0.001) as engine:
        begun = asyncio.Event()
        body = {"prompt": PROMPT, "max_tokens": 1000, "stream": True, "ignore_eos": True}
        lost = asyncio.create_task(call(engine, "/v1/completions", body, on_piece=begun.set))
        other = asyncio.create_task(complete(engine, max_tokens=20))
        await begun.wait()
        lost.cancel()
        answer = await other

        assert answer.json()["usage"]["completion_tokens"] == 20
        assert (engine.load().running, engine.load().kv_tokens_used) == (0, 0)


async def test_closing_the_engine_fails_running_and_new_requests(directory):
    async with running(directory, decode_base_s=0.001) as engine:
        begun = asyncio.Event()
        body = {"prompt": PROMPT, "max_tokens": 1000, "stream": True, "ignore_eos": True}
        request = asyncio.create_task(call(engine, "/v1/completions", body, on_piece=begun.set))
        follower = asyncio.create_task(anext(engine.kv_events()))
        await begun.wait()
        await follower
        follower = asyncio.create_task(follow(engine, HeldBlocks()))
        await engine.close(1.0)

        assert await engine.dead() == "the engine was closed"
        with pytest.raises(EngineDead):
            await follower
        assert b"[DONE]" not in (await request).body
        late = await complete(engine)
        assert (late.status, late.json()["error"]["type"]) == (500, "InternalServerError")


async def follow(engine, held):
    async for events in engine.kv_events():
        held.apply(events)


async def test_events_and_load_follow_the_cache(directory):
    async with running(directory, kv_blocks=64) as engine:
        held, changes = HeldBlocks(), []
        engine.on_load_changed(lambda: changes.append(engine.load().running))
        follower = asyncio.create_task(follow(engine, held))
        for number in range(8):
            await complete(engine, prompt=f"{number} {PROMPT}" * 3, max_tokens=40)
        await asyncio.sleep(0)
        follower.cancel()

        assert held.digest().count == len(set(engine._core.cache.hashes()))
        assert max(changes) == 1
        assert changes[-1] == 0


async def test_routers_get_the_engines_own_tokenizer(engine):
    files = engine.tokenizer_files()

    assert json.loads(files.tokenizer_json)["model"]["type"] == "BPE"
    assert files.special_tokens["bos_token"] == "<|bos|>"
    assert "add_generation_prompt" in files.chat_template


@pytest.mark.parametrize("salt", ["", "tenant"])
async def test_the_engine_reports_a_requests_tokens_and_hashes(directory, salt):
    asked = {"prompt": PROMPT * 3, "cache_salt": salt, "max_tokens": 1}
    async with running(directory) as engine:
        told = await engine.tokens("/v1/completions", json.dumps(asked).encode())
        await complete(engine, **asked)

        assert len(told.hashes) == len(told.tokens) // engine.facts.hashing.block_size > 1
        assert {block_hash64(full) for full in engine._core.cache.hashes()} == set(told.hashes)
        assert (await engine.tokens("/v1/chat/completions", b"{}")).refusal


async def test_a_worker_starts_the_engine_from_its_settings(tmp_path):
    settings = Settings(
        worker_id="w1", engine="simulated", kv_cache_bytes=100 * 32 * 4096, legs_max=7, simulated="transfer=memory"
    )
    said = []
    engine = await start_engine(
        settings, CommonSettings(cache_dir=str(tmp_path)), said.append, identity=Identity(WorkerId("w1"), Epoch(1))
    )
    try:
        facts = engine.facts
        assert (facts.kv_tokens, facts.max_model_len, facts.legs_max) == (3200, 3200, 7)
        assert (facts.engine, facts.models, facts.hashing.block_size) == ("simulated", ["baton-tiny"], 32)
        assert facts.fingerprint.revision
        assert said == ["loading the tokenizer"]
    finally:
        await engine.close(1.0)


def test_workers_that_differ_in_block_size_cannot_pair():
    assert simulation_settings(Settings(block_size=64)).block_size == 64
