"""Twenty turns of coding agents over a prefill and a decode engine: no turn computes its history again.

The SDKs' streaming clients send what Claude Code and Codex send. The model says nothing sensible, so the agents add a
tool call of their own to what it said, as if it had made it.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI

from shared.contracts.inference import LegKind
from shared.contracts.kv_exchange import KvTransferReport
from tests.engines.system.fleet import ANSWER_S_MAX, ENGINES_START_S_MAX, PAIR
from tests.support.kv_driver import BLOCK, MODEL
from tests.support.kv_tap import Tap
from tests.support.nats_server import NatsServer
from tests.support.system import System

pytestmark = [pytest.mark.vllm, pytest.mark.nats]

TURNS = 20
ANSWER_TOKENS_MAX = 48
REUSED_MIN = 0.9
"""Of the tokens of the turn before and its answer."""
TOOLS = ("Bash", "Read", "Edit", "Grep")
WORDS = (
    "runner",
    "baton",
    "lane",
    "Läufer",
    "走れ",
    "handover",
    "lap",
    "def",
    "return",
    "None",
    "\n",
    "(1, 2)",
    "the",
    "of",
)


def prose(seed: str, words: int) -> str:
    return " ".join(random.Random(seed).choices(WORDS, k=words))


def parameters(tool: str) -> dict[str, Any]:
    properties = {name: {"type": "string", "description": prose(tool + name, 20)} for name in ("target", "reason")}
    return {"type": "object", "properties": properties, "required": ["target"], "additionalProperties": False}


INSTRUCTIONS = prose("instructions", 600)


@dataclass(frozen=True)
class Answer:
    """What was said (text and tool calls), and the tokens that its usage counts."""

    text: str
    calls: list[tuple[str, Any]]
    prompt_tokens: int
    tokens: int
    cached_tokens: int


class ClaudeCode:
    """The messages of Claude Code: system blocks, of which one changes every time, marks that move, tool results."""

    def __init__(self, endpoint: str) -> None:
        self.client = AsyncAnthropic(api_key="unused", base_url=endpoint, max_retries=0, timeout=ANSWER_S_MAX)
        self._messages: list[dict[str, Any]] = []

    def body(self, turn: int) -> dict[str, Any]:
        """The body of a turn; the history has the results of its tool already, from the second on."""
        if not turn:
            reminder = {"type": "text", "text": f"<system-reminder>\n{prose('reminder', 60)}\n</system-reminder>"}
            self._messages.append({"role": "user", "content": [reminder, {"type": "text", "text": "Mend the relay."}]})
        marked = {**self._messages[-1], "content": [dict(part) for part in self._messages[-1]["content"]]}
        marked["content"][-1]["cache_control"] = {"type": "ephemeral"}
        billing = f"x-anthropic-billing-header: cc_version=2.1.{turn}; cch={turn:05x};"
        return {
            "max_tokens": ANSWER_TOKENS_MAX,
            "system": [
                {"type": "text", "text": billing},
                {"type": "text", "text": INSTRUCTIONS, "cache_control": {"type": "ephemeral"}},
            ],
            "messages": [*self._messages[:-1], marked],
            "tools": [
                {"name": name, "description": prose(name, 60), "input_schema": parameters(name)} for name in TOOLS
            ],
            "metadata": {"user_id": "user_0_session_1"},
        }

    async def ask(self, body: dict[str, Any], headers: dict[str, str], **more: Any) -> Answer:
        """Stream the answer. The SDK's beta client, as Claude Code uses it, asks with a query; it has no temperature."""
        more["temperature"] = 0
        beta = ["claude-code-20250219", "fine-grained-tool-streaming-2025-05-14"]
        async with self.client.beta.messages.stream(
            model=MODEL, betas=beta, extra_headers=headers, extra_body=more, **body
        ) as stream:
            message = await stream.get_final_message()
        usage = message.usage
        cached = usage.cache_read_input_tokens or 0
        return Answer(
            "".join(block.text for block in message.content if block.type == "text"),
            [(block.name, block.input) for block in message.content if block.type == "tool_use"],
            usage.input_tokens + cached + (usage.cache_creation_input_tokens or 0),
            usage.output_tokens,
            cached,
        )

    def go_on(self, turn: int, answer: Answer) -> None:
        """Add what the model said, a call that it might have made, and the call's result."""
        call = {"type": "tool_use", "id": f"toolu_{turn:024}", "name": TOOLS[turn % len(TOOLS)]}
        call["input"] = {"target": f"lap_{turn}.py", "reason": prose(f"reason {turn}", 5)}
        said = [{"type": "text", "text": answer.text}] if answer.text.strip() else []
        result = {"type": "tool_result", "tool_use_id": call["id"], "content": prose(f"result {turn}", 80)}
        self._messages.append({"role": "assistant", "content": [*said, call]})
        self._messages.append({"role": "user", "content": [result]})


class Codex:
    """The responses of Codex: the whole history as items, nothing kept by the server."""

    def __init__(self, endpoint: str) -> None:
        self.client = AsyncOpenAI(api_key="unused", base_url=f"{endpoint}/v1", max_retries=0, timeout=ANSWER_S_MAX)
        self._items: list[dict[str, Any]] = []

    def body(self, turn: int) -> dict[str, Any]:
        """See ``ClaudeCode.body``."""
        if not turn:
            for role, text in (("developer", prose("permissions", 60)), ("user", "Mend the relay.")):
                content = [{"type": "input_text", "text": text}]
                self._items.append({"type": "message", "role": role, "content": content})
        return {
            "max_output_tokens": ANSWER_TOKENS_MAX,
            "temperature": 0,
            "instructions": INSTRUCTIONS,
            "input": [*self._items],
            "tools": [
                *map(self._function, TOOLS),
                {
                    "type": "namespace",
                    "name": "agents",
                    "description": "Other agents",
                    "tools": [self._function("Send")],
                },
                {"type": "web_search", "external_web_access": False},
            ],
            "tool_choice": "auto",
            "parallel_tool_calls": False,
            "store": False,
            "include": ["reasoning.encrypted_content"],
            "prompt_cache_key": "0199-session",
        }

    def _function(self, name: str) -> dict[str, Any]:
        about = {"description": prose(name, 60), "strict": False, "parameters": parameters(name)}
        return {"type": "function", "name": name, **about}

    async def ask(self, body: dict[str, Any], headers: dict[str, str], **more: Any) -> Answer:
        """Stream the answer."""
        async with self.client.responses.stream(model=MODEL, extra_headers=headers, extra_body=more, **body) as stream:
            response = await stream.get_final_response()
        calls = [(item.name, item.arguments) for item in response.output if item.type == "function_call"]
        usage = response.usage
        cached = usage.input_tokens_details.cached_tokens
        return Answer(response.output_text, calls, usage.input_tokens, usage.output_tokens, cached)

    def go_on(self, turn: int, answer: Answer) -> None:
        """See ``ClaudeCode.go_on``."""
        call_id = f"call_{turn:024}"
        if answer.text.strip():
            said = [{"type": "output_text", "text": answer.text}]
            self._items.append({"type": "message", "role": "assistant", "content": said})
        arguments = f'{{"target":"lap_{turn}.py","reason":"Lap {turn}"}}'
        name = TOOLS[turn % len(TOOLS)]
        self._items.append({"type": "function_call", "call_id": call_id, "name": name, "arguments": arguments})
        result = prose(f"result {turn}", 80)
        self._items.append({"type": "function_call_output", "call_id": call_id, "output": result})


@pytest.fixture(scope="module")
def nats(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    with NatsServer(tmp_path_factory.mktemp("nats"), has_buckets=True) as nats:
        yield nats


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory, nats: NatsServer) -> Iterator[System]:
    """One prefill and one decode engine."""
    with System(tmp_path_factory.mktemp("agents"), *PAIR, nats_url=nats.url) as system:
        system.wait_ready(ENGINES_START_S_MAX).until_exact(2)
        yield system


@pytest.fixture
async def tap(nats: NatsServer, system: System) -> AsyncIterator[Tap]:
    async with Tap(nats.url) as tap:
        yield tap


def reused(report: KvTransferReport) -> int:
    return report.local_tokens + report.fetched_tokens


@pytest.mark.parametrize("kind", [ClaudeCode, Codex])
async def test_turns_of_an_agent_compute_nothing_of_their_history_again(
    system: System, tap: Tap, kind: type[ClaudeCode | Codex]
):
    agent = kind(system.endpoint)
    bodies: list[dict[str, Any]] = []
    apart: list[Answer] = []
    for turn in range(TURNS):
        bodies.append(agent.body(turn))
        name = f"{kind.__name__}-{turn}"
        apart.append(await agent.ask(bodies[-1], {"x-baton-mode": "disaggregated", "x-request-id": name}))
        history = apart[-2].prompt_tokens + apart[-2].tokens if turn else 0
        await check_reuse(tap, name, apart[-1], history)
        agent.go_on(turn, apart[-1])
    # A salt of its own hides what is cached: one engine computes everything itself.
    alone = [await agent.ask(body, {"x-baton-mode": "aggregated"}, cache_salt=f"{kind} alone") for body in bodies]
    await agent.client.close()

    assert [(one.text, one.calls, one.prompt_tokens, one.tokens) for one in apart] == [
        (one.text, one.calls, one.prompt_tokens, one.tokens) for one in alone
    ]
    assert len({one.text for one in apart}) > TURNS / 2


async def check_reuse(tap: Tap, name: str, answer: Answer, history: int) -> None:
    """The transfer reports of both engines: nearly all tokens of the history were cached or fetched."""
    legs = await tap.legs_of(name)
    prefill, decode = legs[LegKind.PREFILL].transfer_report, legs[LegKind.DECODE].transfer_report
    print(
        f"\n{name}: history {history} of {answer.prompt_tokens}, prefill {told(prefill)}, decode {told(decode)}", end=""
    )
    assert prefill.prompt_tokens == decode.prompt_tokens == answer.prompt_tokens
    assert answer.cached_tokens == prefill.local_tokens
    assert reused(prefill) >= REUSED_MIN * history
    assert reused(decode) >= REUSED_MIN * history
    assert decode.recomputed_tokens <= BLOCK
    assert decode.fetched_tokens > 0


def told(report: KvTransferReport) -> str:
    return f"{report.local_tokens} cached, {report.fetched_tokens} fetched, {report.recomputed_tokens} computed"
