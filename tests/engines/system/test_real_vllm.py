"""A system with real vLLM engines and NIXL: the decode engine continues from the prefill engine's KV, token for
token.
"""

from __future__ import annotations

import json
import random
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count, repeat
from typing import Any

import openai
import psutil
import pytest
from openai import OpenAI

from shared.telemetry.span_names import Attribute, SpanName
from tests.engines.system.fleet import ANSWER_S_MAX, DECODE, PREFILL, Fleet
from tests.support.otlp_receiver import OtlpReceiver, Span
from tests.support.processes import freeze, slowed
from tests.support.prompts import VOCABULARY, prompts_with_shared_prefixes
from tests.support.spans import ADD_UP, length, name_of, time_to_first_token
from tests.support.system import Metrics, System, baton, until

pytestmark = [pytest.mark.vllm, pytest.mark.nats]

MODEL = "baton-tiny"
BLOCK = 32
KV_BYTES_PER_TOKEN = 2048
"""2 layers, keys and values, 2 heads of 64 floats."""
ERROR_S_MAX = 30.0
"""From the death of an engine to the error that its stream ends with."""
CLIENT_S_MAX = 5.0
"""What the client itself adds to a TTFT, on a machine that computes as well."""
FRONT_END_S_MAX = 1.0
"""Processes wait for each other on such a machine; it is no part of what engines report."""
TOO_LATE = "tokens' KV came: unreachable"
ENGINE_SPAN = "llm_request"
"""vLLM's own."""
DECODED = 200
TOKEN_CPU_S_MAX = 0.05
"""Of all processes of one worker, for a token of the test's model, which takes about 0.01 s."""


@pytest.fixture(scope="module")
def system(fleet: Fleet) -> System:
    return fleet.system


@pytest.fixture(scope="module")
def client(system: System) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{system.endpoint}/v1", api_key="unused", max_retries=0, timeout=ANSWER_S_MAX) as client:
        yield client


def send(client: OpenAI, prompt: Any, mode: str = "auto", **fields: Any) -> Any:
    extra = {"ignore_eos": True, "return_token_ids": True, **fields.pop("extra_body", {})}
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 32, "temperature": 0, **fields}
    return client.completions.create(**body, extra_body=extra, extra_headers={"x-baton-mode": mode})


def tokens_of(metrics: Metrics, worker_id: str, source: str) -> float:
    return metrics.sum("baton_worker_prompt_tokens_total", worker_id=worker_id, source=source)


def grown(system: System, before: Metrics, worker_id: str, **sums: float) -> dict[str, float]:
    """What was added to a worker's prompt tokens, once the numbers of all requests have arrived."""

    def growth() -> dict[str, float]:
        after = system.fleet_metrics()
        sources = ("computed", "cached", "received")
        return {
            source: tokens_of(after, worker_id, source) - tokens_of(before, worker_id, source) for source in sources
        }

    until(lambda: sum(growth().values()) >= sums["all"], f"{worker_id} has told of {sums['all']} tokens")
    return growth()


def test_both_workers_pass_their_kv_self_test_and_are_ready(system: System):
    fleet = system.fleet()

    assert {worker["phase"] for worker in fleet.values()} == {"ready"}
    # Whoever was ready first had nobody to prove itself with, and answered the other one. On a busy machine an engine may
    # grant too late: that proves nothing, and no worker waits for it. The tests below show that KV is read.
    notes = {fleet[engine]["record"].get("note", "") for engine in (PREFILL, DECODE)}
    assert {note for note in notes if not note.endswith(TOO_LATE)} <= {"", "no partner for a KV self-test at its start"}


def test_a_decode_worker_does_both_and_only_decodes_again_without_a_restart(system: System, client: OpenAI):
    pid = system.worker_pid("decode-1")
    for role in ("both", "decode"):
        code, out, err = baton("role", "decode-1", role, "--json", "--state-dir", str(system.folder))
        assert code == 0, err
        told = json.loads(out)
        print(f"decode-1 is {role} after {told['seconds']:.3f} s")

        assert told["role"] == role
        assert send(client, "Once upon a time", mode="aggregated" if role == "both" else "auto").choices[0].text
    assert system.worker_pid("decode-1") == pid


def test_prompts_give_the_same_tokens_on_two_engines_as_on_one(system: System, client: OpenAI):
    prompts, before = prompts_with_shared_prefixes(20, shortest=100, count=4), system.settled_metrics()
    total = sum(map(len, prompts))

    apart = [send(client, prompt, "disaggregated") for prompt in prompts]
    decode, prefill = (grown(system, before, worker, all=total) for worker in ("decode-1", "prefill-1"))
    received_bytes = system.fleet_metrics().sum("baton_worker_kv_received_bytes_total", worker_id="decode-1")
    # A salt of its own hides what is cached: this engine computes the prompt itself.
    alone = [
        send(client, prompt, "aggregated", extra_body={"cache_salt": f"alone-{number}"})
        for number, prompt in enumerate(prompts)
    ]
    streams = [  # Without a salt the decode worker would have all of them, and answer alone.
        list(send(client, prompt, "disaggregated", stream=True, extra_body={"cache_salt": f"streams-{number}"}))
        for number, prompt in enumerate(prompts)
    ]

    for one, two, events in zip(alone, apart, streams, strict=True):
        assert two.choices[0].token_ids == one.choices[0].token_ids
        assert two.choices[0].text == one.choices[0].text
        assert "".join(event.choices[0].text for event in events) == one.choices[0].text
        assert [token for event in events for token in event.choices[0].token_ids or []] == one.choices[0].token_ids
        assert len(one.choices[0].token_ids) == 32
    assert len({two.choices[0].text for two in apart}) == len(prompts)
    print(f"\nof {total} prompt tokens: decode-1 {decode}, prefill-1 {prefill}, {received_bytes:.0f} bytes received")
    assert decode["computed"] <= len(prompts) * BLOCK
    assert decode["received"] > total / 2
    assert decode["received"] * KV_BYTES_PER_TOKEN <= received_bytes + len(prompts) * BLOCK * KV_BYTES_PER_TOKEN
    assert prefill["received"] == 0
    assert sum(prefill.values()) == sum(decode.values()) == total


def test_usage_counts_prompt_completion_and_cached_tokens(client: OpenAI):
    prompt = random.Random(5).choices(VOCABULARY, k=10 * BLOCK + 9)

    first, second = (send(client, prompt).usage for _ in range(2))
    *_, last = send(client, prompt, stream=True, stream_options={"include_usage": True})

    assert (first.prompt_tokens, first.completion_tokens) == (len(prompt), 32)
    assert not first.prompt_tokens_details or first.prompt_tokens_details.cached_tokens == 0
    assert second.prompt_tokens_details.cached_tokens == 10 * BLOCK
    assert last.usage.prompt_tokens_details.cached_tokens == 10 * BLOCK
    assert last.usage.total_tokens == len(prompt) + 32


@pytest.mark.parametrize(("handoff", "tokens"), [("offered", 200), ("streamed", 3000)])
@pytest.mark.parametrize("mode", ["aggregated", "disaggregated"])
def test_the_parts_of_ttft_add_up_to_the_clients_wait(fleet: Fleet, mode: str, handoff: str, tokens: int):
    http, url = fleet.system.http, fleet.endpoints[handoff]
    prompt = random.Random(f"{mode}{tokens}").choices(VOCABULARY, k=tokens)
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 8, "stream": True}
    if mode == "aggregated":
        body["cache_hit_threshold"] = 0.0  # The workers' own would be one more leg.
    trace_id = uuid.uuid4().hex
    headers = {"x-baton-mode": mode, "traceparent": f"00-{trace_id}-00f067aa0ba902b7-01"}
    begun = time.perf_counter()
    with http.stream("POST", f"{url}/v1/completions", json=body, headers=headers) as answer:
        events = answer.iter_bytes()
        next(events)
        waited_s = time.perf_counter() - begun
        list(events)

    told = http.get(f"{url}/baton/decisions/{answer.headers['x-baton-decision']}").json()

    parts = told["measured"]
    print(
        f"\n{mode}, {tokens} tokens: waited {waited_s * 1e3:.1f} ms;", {n: round(s * 1e3, 1) for n, s in parts.items()}
    )
    assert (told["mode"], told["outcome"]) == (mode, "ok")
    assert sum(parts.values()) == pytest.approx(told["ttft_s"], rel=0.02)
    assert 0 <= waited_s - told["ttft_s"] < CLIENT_S_MAX
    assert parts["prefill_s"] > 0
    assert (parts["decode_prefill_s"] > 0) == (mode == "disaggregated")
    assert parts["front_end_and_bus_s"] < FRONT_END_S_MAX
    the_trace_says_the_same(fleet.receiver, trace_id, told)


def the_trace_says_the_same(receiver: OtlpReceiver, trace_id: str, decision: dict[str, Any]) -> None:
    """Router, workers and engines: one trace, in which the parts follow each other and add up."""
    workers = [worker for worker in (decision["prefill_worker"], decision["decode_worker"]) if worker]

    def spans(name: str) -> list[Span]:
        return [span for span in receiver.spans if (span.trace_id, name_of(span.name)) == (trace_id, name)]

    wanted = {SpanName.REQUEST: 1, SpanName.SERVE_LEG: len(workers), ENGINE_SPAN: len(workers)}
    assert receiver.wait_for(lambda: all(len(spans(name)) == count for name, count in wanted.items()))

    ttft_s, lengths = time_to_first_token([span for span in receiver.spans if span.trace_id == trace_id])
    assert ttft_s == pytest.approx(decision["ttft_s"], rel=ADD_UP)
    computed = {span.instance: length(span) for span in spans(SpanName.ENGINE_PREFILL)}
    assert sorted(computed) == sorted(workers)
    (request,) = spans(SpanName.REQUEST)
    if request.attributes.get(Attribute.HANDOFF) != "streamed":  # Then its end lies before the router's count begins.
        assert computed[workers[0]] == pytest.approx(lengths[SpanName.TTFT_PREFILL], abs=ADD_UP * ttft_s)
    if len(workers) > 1:
        (read,) = spans(SpanName.READ)
        assert computed[workers[1]] == pytest.approx(lengths[SpanName.TTFT_DECODE_PREFILL], abs=ADD_UP * ttft_s)
        assert read.attributes[Attribute.KV_SOURCE] == workers[0]
        assert read.attributes[Attribute.KV_GB_PER_S] > 0


def test_a_body_of_many_nats_messages_works(client: OpenAI):
    prompt = random.Random(6).choices(range(1000, 3000), k=4_000)
    padding = {"metadata": {"note": "x" * 1_200_000}}

    apart = send(client, prompt, "disaggregated", max_tokens=4, extra_body=padding)

    assert apart.usage.prompt_tokens == 4_000
    assert len(apart.choices[0].token_ids) == 4


def chat(client: OpenAI, **fields: Any) -> Any:
    messages = [{"role": "system", "content": "You run."}, {"role": "user", "content": "Who takes the baton? " * 20}]
    return client.chat.completions.create(
        **{"model": MODEL, "messages": messages, "max_tokens": 16, "temperature": 0, **fields}
    )


MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
TEXT_DELTAS = {MESSAGES: "content_block_delta", RESPONSES: "response.output_text.delta"}


def said(
    system: System, path: str, turns: list[dict[str, str]], mode: str, *, stream: bool = False, **fields: Any
) -> tuple[str, dict[str, Any]]:
    """The text of a message or a response, and the decision about it."""
    turns_in, limit = ("messages", "max_tokens") if path == MESSAGES else ("input", "max_output_tokens")
    body = {"model": MODEL, turns_in: turns, limit: 16, "temperature": 0, "stream": stream, **fields}
    answer = system.http.post(path, json=body, headers={"x-baton-mode": mode})
    assert answer.status_code == 200, answer.text
    decision = system.http.get(f"/baton/decisions/{answer.headers['x-baton-decision']}").json()
    if stream:
        lines = [line for line in answer.text.splitlines() if line.startswith("data: {")]
        events = [json.loads(line.removeprefix("data: ")) for line in lines]
        deltas = [event["delta"] for event in events if event["type"] == TEXT_DELTAS[path]]
        return "".join(delta["text"] if isinstance(delta, dict) else delta for delta in deltas), decision
    told = answer.json()
    parts = told["content"] if path == MESSAGES else [part for item in told["output"] for part in item["content"]]
    return "".join(part["text"] for part in parts), decision


def rendered(
    system: System, path: str, turns: list[dict[str, str]], salts: Iterator[str]
) -> tuple[str, dict[str, Any], str]:
    """As ``said``, disaggregated, once the prompt was rendered in time: a busy machine may take longer than a second.
    Also the salt of that attempt: with the salt of another one, the decode worker has the prompt, and answers alone.
    """

    def attempt() -> tuple[str, dict[str, Any], str] | None:
        salt = next(salts)
        text, decision = said(system, path, turns, "disaggregated", cache_salt=salt)
        print(decision["why_inexact"], end="")
        return (text, decision, salt) if decision["exact"] else None

    return until(attempt, "the prompt is rendered in time")


@pytest.mark.parametrize("path", [MESSAGES, RESPONSES])
def test_messages_and_responses_are_handed_over_and_their_next_turn_is_cached(system: System, path: str):
    turns = [{"role": "user", "content": f"Who takes the baton of {path}? " * 40}]

    alone, _ = said(system, path, turns, "aggregated", cache_salt="alone")
    apart, decision, salt = rendered(system, path, turns, (f"attempt {number}" for number in count()))
    streamed, _ = said(system, path, turns, "disaggregated", stream=True, cache_salt="streamed")

    assert apart == streamed == alone != ""
    assert (decision["prefill_worker"], decision["decode_worker"]) == ("prefill-1", "decode-1")
    history = decision["prompt_tokens"]
    assert decision["counted_prompt_tokens"] == history

    more = [*turns, {"role": "assistant", "content": apart}, {"role": "user", "content": "And then?"}]
    _, decision, _ = rendered(system, path, more, repeat(salt))

    assert decision["cached_tokens"] >= 0.9 * history
    assert abs(decision["predicted_cached_tokens"] - decision["cached_tokens"]) <= BLOCK


def counted(path: str, usage: dict[str, Any]) -> dict[str, int]:
    """Tokens of the prompt, those of them that were read from a cache or written to it, and those of the answer."""
    if path == MESSAGES:
        read, written = usage["cache_read_input_tokens"], usage["cache_creation_input_tokens"]
        prompt = usage["input_tokens"] + read + written
    else:
        details, prompt = usage["input_tokens_details"], usage["input_tokens"]
        read, written = details["cached_tokens"], details["cache_write_tokens"]
        assert usage["total_tokens"] == prompt + usage["output_tokens"]
    return {"prompt": prompt, "read": read, "written": written, "answer": usage["output_tokens"]}


def used(system: System, path: str, body: dict[str, Any], mode: str, **fields: Any) -> dict[str, int]:
    """The usage that an answer ends with."""
    answer = system.http.post(path, json={**body, **fields}, headers={"x-baton-mode": mode})
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-baton-mode"] == mode
    if not body["stream"]:
        return counted(path, answer.json()["usage"])
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    end = json.loads(lines[-2 if path == MESSAGES else -1])
    return counted(path, end["usage"] if path == MESSAGES else end["response"]["usage"])


@pytest.mark.parametrize("path", [MESSAGES, RESPONSES])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_usage_of_two_engines_is_that_of_one(system: System, path: str, stream: bool):
    turns = [{"role": "user", "content": f"What does a baton of {path} cost, {stream}? " * 20}]
    turns_in, limit = ("messages", "max_tokens") if path == MESSAGES else ("input", "max_output_tokens")
    body = {"model": MODEL, turns_in: turns, limit: 4, "temperature": 0, "stream": stream}

    longer = {**body, turns_in: [{**turns[0], "content": turns[0]["content"] + "And tomorrow? " * 20}]}

    alone = [used(system, path, asked, "aggregated", cache_salt="alone") for asked in (body, longer)]
    apart = [used(system, path, asked, "disaggregated") for asked in (body, longer)]

    assert apart == alone
    prompt = apart[0]["prompt"]
    assert prompt > 2 * BLOCK
    assert apart[0]["read"] == 0
    assert apart[1]["read"] in {prompt // BLOCK * BLOCK, prompt // BLOCK * BLOCK - BLOCK}  # The turn's end differs.
    assert apart[0]["written"] == prompt // BLOCK * BLOCK


def test_tokens_of_a_message_are_counted_as_the_engine_counts_them(system: System):
    tool = {"name": "start_race", "description": "Starts it.", "input_schema": {"type": "object", "properties": {}}}
    turns = [{"role": "user", "content": "Who takes the baton? " * 9}, {"role": "assistant", "content": "You."}]
    for more in ({}, {"system": "You run."}, {"tools": [tool]}):
        body = {"model": MODEL, "messages": [*turns, {"role": "user", "content": "Läufer, 走れ!"}], **more}

        counting = system.http.post(f"{MESSAGES}/count_tokens", json=body)

        assert counting.status_code == 200, counting.text
        sent = used(system, MESSAGES, {**body, "max_tokens": 1, "stream": False}, "aggregated")
        assert counting.json()["input_tokens"] == sent["prompt"]


TOOL = {
    "type": "function",
    "function": {
        "name": "start_race",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"lane": {"enum": [1, 2]}},
            "required": ["lane"],
            "additionalProperties": False,
        },
    },
}


def test_a_named_tool_is_called_with_arguments_of_its_schema(client: OpenAI):
    choice = {"type": "function", "function": {"name": "start_race"}}

    (call,) = chat(client, tools=[TOOL], tool_choice=choice, max_tokens=64).choices[0].message.tool_calls

    assert call.function.name == "start_race"
    assert json.loads(call.function.arguments)["lane"] in {1, 2}


def test_a_json_schema_is_kept_streamed_and_not(client: OpenAI):
    schema = {
        "type": "object",
        "properties": {"winner": {"enum": ["red", "blue"]}},
        "required": ["winner"],
        "additionalProperties": False,
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "race", "schema": schema}}

    whole = chat(client, response_format=wanted, max_tokens=100).choices[0]
    events = chat(client, response_format=wanted, max_tokens=100, stream=True)

    assert json.loads(whole.message.content)["winner"] in {"red", "blue"}
    assert whole.finish_reason == "stop"
    assert "".join(event.choices[0].delta.content or "" for event in events) == whole.message.content


def test_logprobs_stop_and_several_choices_work(client: OpenAI):
    plain = chat(client, logprobs=True, top_logprobs=2)
    text = plain.choices[0].message.content
    stop = text[len(text) // 2 : len(text) // 2 + 2]
    several = chat(client, n=2, temperature=0.9)

    assert len(plain.choices[0].logprobs.content) == plain.usage.completion_tokens
    assert all(len(token.top_logprobs) == 2 for token in plain.choices[0].logprobs.content)
    assert chat(client, stop=[stop]).choices[0].message.content == text[: text.index(stop)]
    assert [choice.index for choice in several.choices] == [0, 1]


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"max_tokens": -1}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 7}, "top_p"),
        ({"n": 0}, "n must"),
        ({"logit_bias": {"x": 1}}, ""),
        ({"prompt": []}, "prompt"),
        ({"prompt": [10] * 140_000}, "context length"),
    ],
    ids=lambda value: str(value)[:30],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_vllm_rejects_is_400_with_its_message(client: OpenAI, wrong: dict[str, Any], text: str, stream: bool):
    with pytest.raises(openai.BadRequestError) as refused:
        send(client, **{"prompt": "Run!", **wrong}, stream=stream)

    assert text in refused.value.message


def test_malformed_json_is_400_with_vllms_message(system: System):
    answer = system.http.post(
        "/v1/completions", content=b'{"model": "baton-tiny",', headers={"content-type": "application/json"}
    )

    assert answer.status_code == 400
    assert "JSON" in answer.json()["error"]["message"]


def test_an_unknown_model_is_404(client: OpenAI):
    with pytest.raises(openai.NotFoundError):
        send(client, "x", extra_body={"model": "nobody"})


def test_a_client_that_leaves_ends_the_work_on_the_engine(system: System, client: OpenAI):
    stream = send(client, "Run!", stream=True, max_tokens=20_000)
    next(iter(stream))

    stream.close()

    system.until_idle()


def test_decoding_costs_little_processor_time(system: System, client: OpenAI):
    """Which, unlike the time between tokens, does not depend on what else the machine does."""
    engine = tree(system.worker_pid("decode-1"))
    before = cpu_s(engine)

    answer = send(client, "Run!", max_tokens=DECODED)

    each = (cpu_s(engine) - before) / DECODED
    print(f"\n{each * 1000:.1f} ms of processor time per token")
    assert len(answer.choices[0].token_ids) == DECODED
    assert each < TOKEN_CPU_S_MAX


def tree(pid: int) -> list[psutil.Process]:
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]


def cpu_s(processes: list[psutil.Process]) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in processes)


MIGRATED_TOKENS = 240
EVENTS_TOKENS = 2 * MIGRATED_TOKENS
"""Of messages and responses, which begin before the others do."""
LONG_TRIED_MAX = 30
MIDWAY_TRIED_MAX = 6
SOME = 10
"""Events that every client has received when the worker is killed."""
TEXTS = ("Tell me more. ", "Läufer, 走れ! 🏃 ", "def run(baton):\n    return ", "1, 2, 3, ")


class Stream:
    """One stream, and what it has told so far."""

    def __init__(self, path: str, body: dict[str, Any]) -> None:
        self.path = path
        self.body = {"model": MODEL, "temperature": 0, "stream": True, **body}
        self.worker = ""
        self.events: list[dict[str, Any]] = []
        self.ends = 0

    @classmethod
    def of_chunks(cls, number: int) -> Stream:
        """A completion or a chat, of another length for each number."""
        text = TEXTS[number % len(TEXTS)] * (8 + 12 * number)
        body = {"max_tokens": MIGRATED_TOKENS, "ignore_eos": True, "stream_options": {"include_usage": True}}
        body["baton"] = {"decode_worker": "decode-1"}
        if number % 2:
            return cls("/v1/chat/completions", {**body, "messages": [{"role": "user", "content": text}]})
        return cls("/v1/completions", {**body, "prompt": text})

    @classmethod
    def of_events(cls, path: str, number: int) -> Stream:
        """A message or a response."""
        turns = [{"role": "user", "content": f"{number} runners: {TEXTS[number % len(TEXTS)] * 30}"}]
        where = {"baton": {"decode_worker": "decode-1"}}
        if path == MESSAGES:
            return cls(path, {"messages": turns, "max_tokens": EVENTS_TOKENS, **where})
        return cls(path, {"input": turns, "max_output_tokens": EVENTS_TOKENS, "ignore_eos": True, **where})

    def again(self) -> Stream:
        """The same request."""
        return Stream(self.path, self.body)

    def run(self, system: System) -> Stream:
        headers = {"x-baton-mode": "disaggregated"}
        with system.http.stream("POST", self.path, json=self.body, headers=headers) as response:
            self.worker = response.headers["x-baton-decode-worker"]
            for line in response.iter_lines():
                if line == "data: [DONE]":
                    self.ends += 1
                elif line.startswith("data: "):
                    self.events.append(json.loads(line.removeprefix("data: ")))
        return self

    def said(self) -> tuple[Any, ...]:
        """All that must not depend on what happened to the engines."""
        assert not [event for event in self.events if "error" in event], self.events[-1]
        if self.path in TEXT_DELTAS:
            return self._said_in_events()
        choices = [choice for event in self.events for choice in event["choices"]]
        usage = self.events[-1]["usage"]
        return (
            self.text(),
            [choice["finish_reason"] for choice in choices if choice["finish_reason"]],
            [choice["delta"]["role"] for choice in choices if choice.get("delta", {}).get("role")],
            (usage["prompt_tokens"], usage["completion_tokens"]),
            len({event["id"] for event in self.events}),
            self.ends,
        )

    def text(self) -> str:
        """What the model has written so far."""
        if self.path in TEXT_DELTAS:
            deltas = [event["delta"] for event in self.events[:] if event["type"] == TEXT_DELTAS[self.path]]
            return "".join(delta["text"] if isinstance(delta, dict) else delta for delta in deltas)
        choices = [choice for event in self.events[:] for choice in event["choices"]]
        return "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices)

    def _said_in_events(self) -> tuple[Any, ...]:
        """The order of events, however many deltas tell of the text, and what they say."""
        types = [event["type"] for event in self.events]
        order = [kind for kind, before in zip(types, ["", *types], strict=False) if kind != before]
        text = self.text()
        if self.path == MESSAGES:
            end = self.events[-2]
            usage = counted(MESSAGES, end["usage"])
            return order, text, end["delta"]["stop_reason"], usage["prompt"], usage["answer"]
        response = self.events[-1]["response"]
        usage = counted(RESPONSES, response["usage"])
        numbers = [event["sequence_number"] for event in self.events]
        told = {event["item_id"] for event in self.events if "item_id" in event}
        (item,) = response["output"]
        assert told == {item["id"]}
        assert [part["text"] for part in item["content"]] == [text]
        assert response["id"] == self.events[0]["response"]["id"]
        assert response["created_at"] == self.events[0]["response"]["created_at"]
        assert numbers == [*range(len(numbers))]
        return order, text, response["status"], usage["prompt"], usage["answer"]


def long_message(system: System) -> Stream:
    """One that the model does not end soon. vLLM's server of messages has no ``ignore_eos``."""
    for number in range(LONG_TRIED_MAX):
        stream = Stream.of_events(MESSAGES, number).run(system)
        if len(stream.events) > EVENTS_TOKENS // 2:
            return stream
    raise AssertionError("every message ends soon")


def has_begun(streams: list[Stream], running: list[Future[Stream]]) -> bool:
    """Whether each has had some events; or one has ended, which may be after fewer: a busy worker joins tokens."""
    return all(len(stream.events) > SOME for stream in streams) or any(one.done() for one in running)


def midway(
    uncut: list[Stream], engine: psutil.Process, system: System, threads: ThreadPoolExecutor
) -> tuple[list[Stream], list[Future[Stream]]]:
    """Streams of the same requests, each with some of its answer and none near its end. Their engine is stopped; if
    it wrote one whole answer before the last had begun, it is slowed in the next try.
    """
    for tried in range(MIDWAY_TRIED_MAX):
        streams = [stream.again() for stream in uncut]
        running: list[Future[Stream]] = []
        with slowed(engine.pid, 0.5**tried):
            # What a worker must render first begins late.
            for path in (MESSAGES, RESPONSES, "/v1/chat/completions", "/v1/completions"):
                begun = [stream for stream in streams if stream.path == path]
                running += [threads.submit(stream.run, system) for stream in begun]
                until(lambda begun=begun, running=running: has_begun(begun, running), "each has had some", 60.0)
        freeze(engine.pid)
        if all(len(now.text()) < 0.8 * len(then.text()) for now, then in zip(streams, uncut, strict=True)):
            return streams, running
        engine.resume()
        for one in running:
            one.result()
    raise AssertionError("some end before all have begun")


def test_greedy_streams_of_a_dead_engine_continue_on_another_unchanged_if_they_may(system: System, client: OpenAI):
    order_role(system, "prefill-1", "both")
    chunks = [Stream.of_chunks(number).run(system) for number in range(len(TEXTS))]
    uncut = [*chunks, Stream.of_events(RESPONSES, 1).run(system), long_message(system)]
    undisturbed = [stream.said() for stream in uncut]

    worker = system.worker_pid("decode-1")
    engine = max(tree(worker)[1:], key=lambda process: process.memory_info().rss)
    options = {"resumes_max": 0, "decode_worker": "decode-1"}
    fixed = send(client, "Run!", stream=True, max_tokens=20_000, extra_body={"baton": options})
    with ThreadPoolExecutor(len(uncut)) as threads:
        next(iter(fixed))
        streams, running = midway(uncut, engine, system, threads)
        received = [len(stream.events) for stream in streams]
        engine.kill()
        killed_at = time.monotonic()
        with pytest.raises(openai.APIError) as broken:
            list(fixed)
        ended_s = time.monotonic() - killed_at
        for one in running:
            one.result()
        said = [stream.said() for stream in streams]

    print(f"\na stream that may not be resumed ended with {broken.value.code} after {ended_s:.1f} s")
    assert ended_s < ERROR_S_MAX
    assert {stream.worker for stream in streams} == {"decode-1"}
    whole = [len(stream.events) for stream in streams]
    assert all(map(int.__lt__, received, whole)), "the engine was killed too late to prove anything"
    assert said == undisturbed
    assert system.metrics().sum("baton_router_resumes_total") >= len(streams)
    until(lambda: system.pids("services.worker", "decode-1") not in ([], [worker]), "the worker is started again")


def order_role(system: System, worker_id: str, role: str) -> None:
    code, _out, err = baton("role", worker_id, role, "--json", "--state-dir", str(system.folder))
    assert code == 0, err
