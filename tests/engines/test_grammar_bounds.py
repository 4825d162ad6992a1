"""Structured output that would take minutes to compile, on a real engine beside requests that must not wait for it."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from shared.contracts.engine_paths import CHAT, COMPLETIONS, RESPONSES
from shared.contracts.inference import LegKind
from tests.engines.test_handover import completion

pytestmark = pytest.mark.vllm

WORDS = [f"word-{number}" for number in range(20_000)]
SOON_S = 20.0
"""On a machine with other work. Each of these compilations takes minutes of its time."""


def schema_of(properties: dict, required: list[str] | None = None) -> dict:
    return {"type": "object", "properties": properties, "required": required or [], "additionalProperties": False}


def formatted(schema: dict) -> dict:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}}


def chat(**more) -> dict:
    return {"model": "baton-tiny", "messages": [{"role": "user", "content": "go"}], "max_tokens": 24, **more}


ENUMERATED = schema_of({"a": {"enum": WORDS}}, ["a"])
OPTIONAL = schema_of({f"property_{number}": {"type": "string"} for number in range(5000)})
ATTACKS = {
    "2 MB choice": (COMPLETIONS, completion("go", structured_outputs={"choice": ["x" * 2_000_000]})),
    "20,000 choices": (COMPLETIONS, completion("go", structured_outputs={"choice": WORDS})),
    "20,000 enum values": (CHAT, chat(**formatted(ENUMERATED))),
    "20,000 enum values of a response": (
        RESPONSES,
        {
            "model": "baton-tiny",
            "input": "go",
            "max_output_tokens": 24,
            "text": {"format": {"type": "json_schema", "name": "s", "schema": ENUMERATED}},
        },
    ),
    "a regex that explodes": (COMPLETIONS, completion("go", structured_outputs={"regex": "a?" * 3000 + "a" * 3000})),
}
"""The last one runs until its processor time is used up. ``test_grammar_process.py`` has more of them, in less time."""
INNOCENT = schema_of({"name": {"type": "string", "maxLength": 40}, "age": {"type": "integer"}}, ["name", "age"])


async def answered(pair, router, path: str, body: dict, **options) -> tuple[int, dict]:
    answer = await router.leg(pair[1], LegKind.AGGREGATED, body, path=path, **options)
    assert answer.failure is None
    return answer.status, answer.json()


@contextmanager
def within(s_max: float) -> Iterator[None]:
    begun = time.monotonic()
    yield
    assert time.monotonic() - begun < s_max


async def test_no_costly_grammar_keeps_others_from_structured_output(pair, router):
    attacks = [
        asyncio.create_task(answered(pair, router, path, body, cache_salt="attacker", deadline_s=300.0))
        for path, body in ATTACKS.values()
    ]
    for number in range(4):
        with within(SOON_S):
            status, answer = await answered(
                pair,
                router,
                COMPLETIONS,
                completion("say", ignore_eos=False, structured_outputs={"choice": [f"yes {number}", "no"]}),
            )
        assert (status, answer["choices"][0]["text"] in {f"yes {number}", "no"}) == (200, True)
        with within(SOON_S):
            schema = INNOCENT | {"title": str(number)}
            status, _ = await answered(pair, router, CHAT, chat(**formatted(schema)))
        assert status == 200

    for name, attack in zip(ATTACKS, attacks, strict=True):
        status, answer = await attack
        assert (name, status) == (name, 400)
        assert any(word in answer["error"]["message"] for word in ("at most", "to compile")), answer
    for path, body in ATTACKS.values():
        with within(SOON_S / 4):  # A second time it is refused at once.
            assert (await answered(pair, router, path, body))[0] == 400


async def test_a_client_that_leaves_ends_its_trial(pair, router):
    leg = await router.start(
        pair[1], LegKind.AGGREGATED, chat(**formatted(OPTIONAL | {"title": "left"})), path=CHAT, deadline_s=300.0
    )
    await until(lambda: trials_of(pair[1]))

    leg.cancel()

    await until(lambda: not trials_of(pair[1]))


async def test_structured_output_of_ordinary_size_is_served(pair, router):
    properties = {f"p{number}": {"type": "string", "description": "of it " * 90} for number in range(120)}
    large = schema_of(properties, list(properties)[:8])
    assert len(json.dumps(large)) > 65_000

    status, _ = await answered(pair, router, CHAT, chat(**formatted(large)), deadline_s=120.0)
    few, _ = await answered(pair, router, CHAT, chat(**formatted(schema_of({"a": {"enum": WORDS[:800]}}, ["a"]))))
    told, error = await answered(
        pair, router, COMPLETIONS, completion("go", structured_outputs={"grammar": "root ::= ("})
    )

    assert (status, few, told) == (200, 200, 400)
    assert "rammar" in error["error"]["message"], "vLLM's own message"


def trials_of(worker) -> list[int]:
    """Children of the process that tries grammars."""
    return [child.pid for child in worker.children() if child.ppid() != worker.process.pid and child.nice() == 10]


async def until(condition, s_max: float = 60.0) -> None:
    async with asyncio.timeout(s_max):
        while not condition():
            await asyncio.sleep(0.05)  # processes appear and end without telling anyone
