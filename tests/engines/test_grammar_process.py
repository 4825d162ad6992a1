"""Grammars are tried by vLLM's own code in a real process, behind vLLM's own server; only the engine is missing (see
``front``).
"""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from services.worker.engines.vllm.grammar_trials import GrammarRefused, GrammarTrials
from services.worker.legs.asgi_call import ask_app
from services.worker.tiny_model import CONTEXT_TOKENS, _config, ensure_tiny_tokenizer
from shared.contracts.engine_paths import CHAT, CHAT_BATCH, COMPLETIONS, RESPONSES
from tests.engines.front import MODEL, Front, front
from tests.engines.test_media import workers_environment

pytestmark = pytest.mark.vllm
__all__ = ("workers_environment",)

CPU_S = 1.5
EXPLODES = "a?" * 3000 + "a" * 3000
"""A regular expression of 9 KB that xgrammar compiles for minutes."""
OPTIONAL = {
    "type": "object",
    "properties": {f"property_{number}": {"type": "string"} for number in range(5000)},
    "additionalProperties": False,
}
MANY = {"type": "object", "properties": {"a": {"enum": [f"v{number}" for number in range(12_000)]}}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": MANY}}
MESSAGES = [{"role": "user", "content": "go"}]


def formatted(schema: dict) -> dict:
    return {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}


PATHS = {
    "choice": (COMPLETIONS, {"prompt": "go", "structured_outputs": {"choice": ["word"] * 20_000}}),
    "regex": (COMPLETIONS, {"prompt": "go", "structured_outputs": {"regex": EXPLODES}}),
    "schema, streamed": (CHAT, {"messages": MESSAGES, "response_format": formatted(MANY), "stream": True}),
    "grammar": (CHAT, {"messages": MESSAGES, "structured_outputs": {"grammar": f"root ::= {'[a-z]? ' * 5000}"}}),
    "schema": (CHAT, {"messages": MESSAGES, "response_format": formatted(OPTIONAL)}),
    "schema as text": (COMPLETIONS, {"prompt": "go", "structured_outputs": {"json": json.dumps(MANY)}}),
    "several conversations": (CHAT_BATCH, {"messages": [MESSAGES] * 2, "response_format": formatted(MANY)}),
    "tool": (CHAT, {"messages": MESSAGES, "tools": [TOOL], "tool_choice": "required"}),
    "named tool": (
        CHAT,
        {"messages": MESSAGES, "tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}},
    ),
    "response": (RESPONSES, {"input": "go", "text": {"format": {"type": "json_schema", "name": "s", "schema": MANY}}}),
}


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[tuple[Front, GrammarTrials]]:
    from services.worker.engines.vllm import grammar_process

    made = tmp_path / "model"
    shutil.copytree(ensure_tiny_tokenizer(tmp_path), made)
    (made / "config.json").write_text(json.dumps(_config(4096)))
    async with front(
        made, "--enable-auto-tool-choice --tool-call-parser pythonic", [20, 1], max_model_len=CONTEXT_TOKENS
    ) as served:
        engine = served.core._engine
        deaths: list[str] = []
        engine.grammars = trials = GrammarTrials(grammar_process.start(engine.vllm_config), deaths.append, CPU_S)
        await trials.connect()
        try:
            yield served, trials
        finally:
            trials.close()
        assert not deaths


def demand(**fields: object) -> SimpleNamespace:
    return SimpleNamespace(**fields)


def children(trials: GrammarTrials) -> list[psutil.Process]:
    return psutil.Process(trials._process.pid).children()


async def until(condition, s_max: float = 60.0) -> None:
    async with asyncio.timeout(s_max):
        while not condition():
            await asyncio.sleep(0.02)  # processes appear and end without telling anyone


@pytest.mark.parametrize("name", PATHS)
async def test_what_takes_too_long_to_compile_is_refused_on_every_path(server, name):
    served, trials = server
    path, fields = PATHS[name]
    body = json.dumps({"model": MODEL, **fields}).encode()

    status, answer = await ask_app(served.app, path, body)
    begun = trials.begun
    again, _ = await ask_app(served.app, path, body)

    if "stream" in fields:  # The head has been sent; the worker's router sees the error before any token.
        assert (status, again) == (200, 200)
        assert b'"code":400' in answer.replace(b" ", b"")
    else:
        assert (status, again) == (400, 400), answer
    assert b"to compile" in answer or b"at most" in answer
    assert len(answer) < 2000
    assert trials.begun == begun, "it is refused without a trial"
    assert not served.core.asked, "the engine has not got it"


async def test_ordinary_demands_reach_the_engine_and_are_tried_once(server):
    served, trials = server
    ordinary = [
        (CHAT, {"messages": MESSAGES, "response_format": {"type": "json_object"}}),
        (CHAT, {"messages": MESSAGES, "response_format": formatted({"type": "object", "properties": {"a": {}}})}),
        (COMPLETIONS, {"prompt": "go", "structured_outputs": {"choice": [f"product {n}" for n in range(800)]}}),
        (COMPLETIONS, {"prompt": "go", "structured_outputs": {"regex": r"[\w.]{1,64}@[\w.]{1,64}"}}),
        (COMPLETIONS, {"prompt": "go", "structured_outputs": {"json": {"type": "integer", "multipleOf": 3}}}),
        (COMPLETIONS, {"prompt": "go", "structured_outputs": {"grammar": 'root ::= "a" root | "b"'}}),
    ]
    for path, fields in ordinary * 2:
        status, answer = await ask_app(served.app, path, json.dumps({"model": MODEL, **fields}).encode())
        assert status == 200, answer

    assert len(served.core.asked) == len(ordinary) * 2
    before_guidance_was_needed = (
        4  # Once more with it, which might have been the library of the engine's first request.
    )
    assert trials.begun == len(ordinary) + before_guidance_was_needed
    invalid = json.dumps({"model": MODEL, "prompt": "go", "structured_outputs": {"grammar": "root ::= ("}}).encode()
    assert (await ask_app(served.app, COMPLETIONS, invalid))[0] == 400


async def test_quick_trials_do_not_wait_for_long_ones(server):
    _, trials = server
    await trials.permit(demand(regex="warm"), "")
    long = [asyncio.create_task(trials.permit(demand(regex=EXPLODES + str(n)), "")) for n in range(2)]
    await until(lambda: children(trials))

    begun = time.monotonic()
    await trials.permit(demand(choice=["yes", "no"]), "other")
    took = time.monotonic() - begun
    assert not any(one.done() for one in long) or took < 1.0

    refused = await asyncio.gather(*long, return_exceptions=True)
    assert {type(one) for one in refused} == {GrammarRefused}


async def test_a_trial_ends_with_the_request_and_with_the_worker(server):
    _, trials = server
    asked = asyncio.create_task(trials.permit(demand(regex=EXPLODES), ""))
    await until(lambda: children(trials))

    asked.cancel()

    await until(lambda: not children(trials))
    asked = asyncio.create_task(trials.permit(demand(regex=EXPLODES), ""))
    await until(lambda: children(trials))
    running = children(trials)
    trials.close()
    trials.close = lambda: None  # for the fixture
    await asyncio.to_thread(psutil.wait_procs, running, 10.0)
    assert not [one for one in running if one.is_running()]
    asked.cancel()
