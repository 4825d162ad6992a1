"""Workloads made from published statistics by a seed: sessions of requests, without a trace file.

Each figure is from the source named beside it, or marked as assumed. The sources:

* WildChat: Zhao et al., ICLR 2024, table of data sets (turns; tokens of user and chatbot, mean and deviation).
* TraceLab: SyFI TraceLab, University of Washington, 357,161 steps of Claude Code and Codex, 2026 (tokens and steps).
* agentic-kvc: inter-turn gaps of 127,000 sessions of a production coding service (783,000 gaps), repository of that
  name, 2026.
* AIPerf: its agentic code generator's default configuration, NVIDIA, 2026 (the session's own context, prompt limit).
* cc-traces: SemiAnalysis's traces of Claude Code, 2026 (tokens of tools and system prompt).
* Splitwise: Patel et al., ISCA 2024, and its trace of code completion (tokens).
* DeepSeek: R1-0528's model card (tokens to solve a problem) and API guide (32K thoughts, left out of later prompts).
* KVCache in the Wild: Wang et al., ATC 2025 (when conversations return), ServeGen: Xiang et al., 2025 (thoughts are
  bimodal; some clients arrive in bursts).

A session's prompts grow: each begins with the prompt and answer before it. ``Request.at_s`` is when a request would
arrive if answers took ``FIRST_TOKEN_S`` and ``TOKEN_S``; with ``Request.gap_s`` the loop is closed, so it arrives
that long after the answer before it, however long that took. ``opened`` makes a workload arrive by ``at_s``.
"""

from __future__ import annotations

import heapq
import math
import random
from bisect import insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from replay.traces import BLOCK_TOKENS, Request

FIRST_TOKEN_S, TOKEN_S = 0.5, 0.02
"""Assumed of answers, to plan ``at_s``."""


@dataclass(frozen=True, slots=True)
class LogNormal:
    """A heavy-tailed quantity, cut to a range."""

    median: float
    sigma: float
    """Of its logarithm."""
    high: float
    low: float = 1.0

    def draw(self, rng: random.Random) -> float:
        """One value."""
        return min(self.high, max(self.low, self.median * math.exp(rng.gauss(0.0, self.sigma))))

    def tokens(self, rng: random.Random) -> int:
        """One whole value."""
        return round(self.draw(rng))


def by_moments(mean: float, deviation: float, high: float) -> LogNormal:
    """The log-normal distribution with this mean and standard deviation (before it is cut)."""
    variance = math.log(1 + (deviation / mean) ** 2)
    return LogNormal(mean * math.exp(-variance / 2), math.sqrt(variance), high)


Contents = dict[tuple[Any, ...], int]
"""Ids of block contents: equal pieces of equal texts have equal ids."""


@dataclass(slots=True)
class Text:
    """A growing text: the contents of its full blocks, and the pieces of the block that is not full yet."""

    contents: Contents
    block_tokens: int
    blocks: list[int] = field(default_factory=list)
    tokens: int = 0
    _open: list[tuple[Any, int, int]] = field(default_factory=list)

    def append(self, name: Any, tokens: int) -> None:
        """Append the first ``tokens`` of the text of that name."""
        done = 0
        while done < tokens:
            room = self.block_tokens - self.tokens % self.block_tokens
            count = min(room, tokens - done)
            self._open.append((name, done, count))
            done += count
            self.tokens += count
            if count == room:
                self.blocks.append(self.contents.setdefault(tuple(self._open), len(self.contents)))
                self._open.clear()

    def copy(self) -> Text:
        """The same text, to continue otherwise."""
        return Text(self.contents, self.block_tokens, list(self.blocks), self.tokens, list(self._open))


@dataclass(slots=True)
class Session:
    """What a workload draws from while it makes one session."""

    rng: random.Random
    name: str
    """Of the workload or tenant; its shared texts are its own."""
    seed: int
    number: int
    text: Text
    _texts: int = 0

    def append(self, tokens: int) -> None:
        """Append text that no other session has."""
        self._texts += 1
        self.text.append((self.name, self.number, self._texts), tokens)

    def append_shared(self, kind: str, count: int, length: LogNormal, zipf: float = 1.0) -> None:
        """Append one of ``count`` shared texts; the k-th is drawn in proportion to 1 / k ** ``zipf``."""
        which = self.rng.choices(range(count), [(each + 1) ** -zipf for each in range(count)])[0]
        rng = random.Random(f"{self.name} {self.seed} {kind} {which}")
        self.text.append((self.name, kind, which), length.tokens(rng))

    def turn(self, gap_s: float, tokens_out: int, *, kept: int | None = None) -> Turn:
        """The text so far is a prompt. Its answer is appended, or ``kept`` tokens of it: the end, without thoughts."""
        prompt, blocks = self.text.tokens, tuple(self.text.blocks)
        self.append(tokens_out if kept is None else kept)
        answer = tuple(self.text.blocks[len(blocks) :]) if kept is None else ()
        return Turn(gap_s, blocks, prompt, tokens_out, answer)


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a session; see ``Request``."""

    gap_s: float
    blocks: tuple[int, ...]
    input_tokens: int
    output_tokens: int
    answer: tuple[int, ...]


CHAT_USER = by_moments(295.6, 1609.2, 16_000)
"""WildChat."""
CHAT_ANSWER = by_moments(441.3, 410.9, 4_000)
"""WildChat."""
CHAT_TURNS_MEAN = 2.54
"""WildChat."""
THINK_S = LogNormal(60.0, 1.5, 600.0)
"""Assumed, and cut where KVCache in the Wild has 80 % of its conversations back: later turns find no cache on a GPU."""
CHAT_SYSTEM = LogNormal(1_000.0, 0.7, 4_000)
"""Assumed: system prompts of some applications."""


def conversations(session: Session) -> Iterator[Turn]:
    """A system prompt that an application's users share, then a person and a chatbot in turns."""
    rng = session.rng
    session.append_shared("system", 8, CHAT_SYSTEM)
    gap_s = 0.0
    while True:
        session.append(CHAT_USER.tokens(rng))
        yield session.turn(gap_s, CHAT_ANSWER.tokens(rng))
        if rng.random() < 1 / CHAT_TURNS_MEAN:
            return
        gap_s = THINK_S.draw(rng)


AGENT_TOOLS = LogNormal(15_000.0, 0.2, 24_000)
"""cc-traces: some 12,500 tokens of tools and 2,800 of system prompt, the same in all sessions of an agent."""
AGENT_TASK = LogNormal(5_000.0, 1.48, 30_000)
"""AIPerf: median 5,000, mean 15,000, at most 30,000."""
AGENT_APPEND = LogNormal(870.0, 1.59, 10_000)
"""TraceLab: median 857 and 886, p90 5,342 and 8,310 (Claude and Codex); cut as AIPerf does."""
AGENT_ANSWER = LogNormal(220.0, 1.39, 6_500)
"""TraceLab: median 252 and 184, p90 1,671 and 939, p99 6,571 and 3,508."""
AGENT_STEPS = LogNormal(15.0, 1.8, 60.0)
"""TraceLab has a few long sessions (82 steps on average, p90 about 150); cut so that runs of an hour end."""
TOOL_S = LogNormal(1.6, 2.5, 600.0, low=0.05)
"""agentic-kvc: p25 0.69 s, median 1.6, p75 8.6, p90 44; pauses of people included."""
AGENT_PROMPT_MAX = 96_000
"""Assumed; AIPerf retires sessions at 167,000 tokens, more than fits with others into the profiles' caches."""


def agents(session: Session) -> Iterator[Turn]:
    """Agents with tools: a long prompt that all sessions of an agent share, a task, then many quick steps."""
    rng = session.rng
    session.append_shared("tools", 4, AGENT_TOOLS)
    session.append(AGENT_TASK.tokens(rng))
    gap_s = 0.0
    for _step in range(AGENT_STEPS.tokens(rng)):
        yield session.turn(gap_s, AGENT_ANSWER.tokens(rng))
        session.append(AGENT_APPEND.tokens(rng))
        if session.text.tokens > AGENT_PROMPT_MAX:
            return
        gap_s = TOOL_S.draw(rng)


CODE_PROMPT = LogNormal(1_500.0, 0.8, 6_000)
"""Splitwise: median 1,500; its spread is assumed."""
CODE_ANSWER = LogNormal(13.0, 1.24, 1_000)
"""Splitwise: median 13, mean 28."""
CODE_REPOSITORY = LogNormal(8_000.0, 0.5, 24_000)
"""Assumed: context of the repository before the file, the same for all who work on it."""
CODE_REQUESTS_MEAN = 10.0
CODE_GAP_S = LogNormal(8.0, 1.0, 120.0)
"""Assumed: pauses between two completions of one person."""
CODE_FILE_KEPT = 0.7
"""Assumed: share of the file before the place that changes between two completions."""


def code(session: Session) -> Iterator[Turn]:
    """Code completion: a repository's context, a file that is edited near its end, a short answer."""
    rng = session.rng
    session.append_shared("repository", 24, CODE_REPOSITORY)
    base = session.text
    tokens = CODE_PROMPT.tokens(rng)
    head = round(CODE_FILE_KEPT * tokens)
    base.append((session.name, session.number, "file"), head)
    gap_s = 0.0
    while True:
        session.text = base.copy()
        session.append(tokens - head)
        yield session.turn(gap_s, CODE_ANSWER.tokens(rng))
        if rng.random() < 1 / CODE_REQUESTS_MEAN:
            return
        gap_s = CODE_GAP_S.draw(rng)


REASONING_TURNS_MEAN = 1.5
"""Assumed."""
LONG_THOUGHTS_SHARE = 0.4
"""Assumed; ServeGen: thoughts are bimodal."""
SHORT_THOUGHTS = LogNormal(800.0, 0.8, 32_768)
"""Assumed."""
LONG_THOUGHTS = LogNormal(8_000.0, 0.9, 32_768)
"""DeepSeek: 12,000 tokens on average for a hard problem, at most 32,768."""


def reasoning(session: Session) -> Iterator[Turn]:
    """Short questions, and thoughts before the answer: heavy-tailed outputs, of which later prompts have the answer."""
    rng = session.rng
    session.append_shared("system", 4, CHAT_SYSTEM)
    gap_s = 0.0
    while True:
        session.append(CHAT_USER.tokens(rng))
        thoughts = (LONG_THOUGHTS if rng.random() < LONG_THOUGHTS_SHARE else SHORT_THOUGHTS).tokens(rng)
        answer = CHAT_ANSWER.tokens(rng)
        yield session.turn(gap_s, min(thoughts + answer, 32_768), kept=min(answer, 32_768))
        if rng.random() < 1 / REASONING_TURNS_MEAN:
            return
        gap_s = THINK_S.draw(rng)


EXTRACT_PROMPT = by_moments(2_050.0, 1_500.0, 7_400)
"""Splitwise's code completion: 2,048 tokens on average, at most 7,437."""
EXTRACT_ANSWER = LogNormal(15.0, 1.1, 1_000)
"""Splitwise's code completion: median 13, mean 28."""


def extracts(session: Session) -> Iterator[Turn]:
    """Independent prompts in bursts, with short answers. Nothing is shared."""
    session.append(EXTRACT_PROMPT.tokens(session.rng))
    yield session.turn(0.0, EXTRACT_ANSWER.tokens(session.rng))


DOCUMENT_SHARE = 0.35
"""Assumed: of the sessions, those that begin with a document."""
DOCUMENT = LogNormal(9_000.0, 1.25, 120_000)
"""Assumed; Mooncake's conversations have 12,035 tokens on average, and 126,195 at most."""
DOCUMENT_TURNS_MEAN = 1.6
"""Assumed."""


def documents(session: Session) -> Iterator[Turn]:
    """Conversations, of which some begin with a document of up to 120,000 tokens; sessions share nothing."""
    rng = session.rng
    has_document = rng.random() < DOCUMENT_SHARE
    if has_document:
        session.append(DOCUMENT.tokens(rng))
    gap_s = 0.0
    while True:
        session.append(CHAT_USER.tokens(rng))
        yield session.turn(gap_s, CHAT_ANSWER.tokens(rng))
        if rng.random() < 1 / (DOCUMENT_TURNS_MEAN if has_document else CHAT_TURNS_MEAN):
            return
        gap_s = THINK_S.draw(rng)


@dataclass(frozen=True, slots=True)
class Workload:
    """One kind of traffic."""

    make: Callable[[Session], Iterator[Turn]]
    turns: float
    """Requests of a session, on average."""
    variation: float = 1.0
    """The coefficient of variation between the starts of sessions; 1: Poisson. ServeGen has clients far above."""


WORKLOADS = {
    "conversations": Workload(conversations, CHAT_TURNS_MEAN),
    "agents": Workload(agents, 15.6),
    "code": Workload(code, CODE_REQUESTS_MEAN),
    "reasoning": Workload(reasoning, REASONING_TURNS_MEAN),
    "extracts": Workload(extracts, 1.0, variation=2.5),
    "documents": Workload(documents, 2.2),
}
MIXED = "tenants"
TENANTS = {"conversations": (0.45, 1.0), "agents": (0.3, 1.0), "code": (0.2, 3.0), "reasoning": (0.05, 1.0)}
"""Of the mixed workload: share of the requests, and the coefficient of variation between the starts of sessions
(1: Poisson; ServeGen has clients of 1 and others far above). Assumed.
"""
NAMES = (*WORKLOADS, MIXED)


def generate(
    name: str, count: int, *, seed: int = 0, per_s: float = 1.0, block_tokens: int = BLOCK_TOKENS
) -> list[Request]:
    """The first ``count`` requests of a workload, in the order of ``at_s``; about ``per_s`` of them a second.

    ``name``: one of ``NAMES``. Equal arguments give equal requests.
    """
    contents: Contents = {}
    made: list[Request] = []
    times: list[float] = []
    for number, (starts_s, tenant) in enumerate(_starts(name, seed, per_s)):
        if len(times) >= count and starts_s > times[count - 1]:
            break
        ended_s = starts_s
        rng = random.Random(f"{tenant} {seed} {number}")
        session = Session(rng, tenant, seed, number, Text(contents, block_tokens))
        for turn in WORKLOADS[tenant].make(session):
            at_s = ended_s + turn.gap_s
            made.append(
                Request(
                    at_s,
                    turn.blocks,
                    turn.input_tokens,
                    turn.output_tokens,
                    answer=turn.answer,
                    session=number,
                    gap_s=turn.gap_s,
                    tenant=tenant,
                )
            )
            insort(times, at_s)
            ended_s = at_s + FIRST_TOKEN_S + turn.output_tokens * TOKEN_S
    made.sort(key=lambda request: request.at_s)
    start_s = made[0].at_s
    return [replace(request, at_s=request.at_s - start_s) for request in made[:count]]


def _starts(name: str, seed: int, per_s: float) -> Iterator[tuple[float, str]]:
    """When sessions start, and of which tenant, in order, without end."""
    return heapq.merge(
        *(
            _starts_of(tenant, share * per_s / WORKLOADS[tenant].turns, variation, seed)
            for tenant, (share, variation) in (
                TENANTS if name == MIXED else {name: (1.0, WORKLOADS[name].variation)}
            ).items()
        )
    )


def _starts_of(tenant: str, per_s: float, variation: float, seed: int) -> Iterator[tuple[float, str]]:
    """Gamma-distributed gaps, ``per_s`` sessions a second."""
    rng = random.Random(f"{tenant} {seed} starts")
    at_s = 0.0
    while True:
        at_s += rng.gammavariate(1 / variation**2, variation**2 / per_s)
        yield at_s, tenant


def opened(requests: list[Request]) -> list[Request]:
    """The same requests in an open loop: each arrives at its ``at_s``."""
    return [replace(request, gap_s=None) for request in requests]
