"""The loads of ``make bench-serving``, what its client is told, and what it answers."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean
from typing import Literal

import msgspec


class Random(msgspec.Struct, frozen=True, tag=True):
    """``vllm bench serve`` with random prompts, of which none begins like another."""

    prompt_tokens: int
    answer_tokens: int
    requests: int
    at_once: int = 0
    """Requests at a time, where ``per_s`` is 0."""
    per_s: float = 0.0
    """Poisson arrivals."""

    @property
    def prompt_tokens_mean(self) -> int:
        return self.prompt_tokens


class Conversations(msgspec.Struct, frozen=True, tag=True):
    """Chats that grow, each of which sends its next turn when it has its answer."""

    conversations: int
    turns: int
    """Requests of each."""
    at_once: int
    shared_tokens: int
    """All conversations begin with these."""
    own_tokens: int
    """Behind them, in the first turn."""
    turn_tokens: tuple[int, int]
    """New ones of each turn: least and most."""
    answer_tokens: tuple[int, int]

    @property
    def prompt_tokens_mean(self) -> int:
        grows = fmean(self.turn_tokens) + fmean(self.answer_tokens)
        return int(self.shared_tokens + self.own_tokens + fmean(self.turn_tokens) + grows * (self.turns - 1) / 2)


class Job(msgspec.Struct, frozen=True):
    """One run, for the client."""

    url: str
    model: str
    headers: dict[str, str]
    tokenizer: str
    seed: int
    load: Random | Conversations


class Answer(msgspec.Struct, frozen=True):
    """One request that was answered in full."""

    ttft_s: float
    tpot_s: float
    """Mean time between tokens after the first."""
    prompt_tokens: int
    tokens: int


class Result(msgspec.Struct, frozen=True):
    """Of one run."""

    answers: list[Answer]
    took_s: float
    failed: str = ""
    """Why it means nothing; empty if it does."""


Kind = Literal["random", "multi-turn", "agents", "rate"]


@dataclass(frozen=True)
class Load:
    """One part of the page."""

    name: str
    said: str
    run: Random | Conversations
    kind: Kind


@dataclass(frozen=True)
class Size:
    """How much of each load."""

    random: Random
    turns: Conversations
    agents: Conversations
    rates: tuple[float, ...]
    """Shares of the requests per second that one engine completes of ``random``."""
    rate_s: float
    """Length of each."""
    rounds: int


TURNS = Conversations(
    conversations=4, turns=4, at_once=4, shared_tokens=500, own_tokens=1000, turn_tokens=(120, 160),
    answer_tokens=(80, 120),
)  # fmt: skip
AGENTS = Conversations(
    conversations=4, turns=6, at_once=4, shared_tokens=1200, own_tokens=200, turn_tokens=(350, 450),
    answer_tokens=(24, 36),
)  # fmt: skip
CPU = Size(Random(512, 64, 32, at_once=8), TURNS, AGENTS, rates=(0.4, 0.7, 1.0), rate_s=5.0, rounds=3)
QUICK = Size(
    Random(512, 32, 12, at_once=4),
    msgspec.structs.replace(TURNS, turns=2),
    msgspec.structs.replace(AGENTS, turns=3),
    rates=(0.5, 1.0),
    rate_s=3.0,
    rounds=1,
)
GPU = Size(
    Random(2048, 128, 256, at_once=32),
    msgspec.structs.replace(TURNS, conversations=48, turns=6, at_once=16),
    msgspec.structs.replace(AGENTS, conversations=24, turns=16, at_once=16, shared_tokens=3000),
    rates=(0.4, 0.7, 1.0),
    rate_s=12.0,
    rounds=3,
)


def closed_loads(size: Size) -> list[Load]:
    """Loads in a closed loop: as fast as they are served."""
    random, turns, agents = size.random, size.turns, size.agents
    return [
        Load(
            "Random prompts",
            f"`vllm bench serve`, {random.requests} random prompts of {random.prompt_tokens} tokens, {random.answer_tokens} out, {random.at_once} at a time.",
            random,
            "random",
        ),
        Load(
            "Multi-turn",
            f"Own client with the lengths of vLLM's `generate_multi_turn.json`: {_conversed(turns)}",
            turns,
            "multi-turn",
        ),
        Load(
            "Coding agents",
            f"Own client: {_conversed(agents)} In to out {agents.prompt_tokens_mean / fmean(agents.answer_tokens):.0f} to 1.",
            agents,
            "agents",
        ),
    ]


def _conversed(load: Conversations) -> str:
    least, most = load.turn_tokens
    return (
        f"{load.conversations} chats of {load.turns} turns, {load.at_once} at a time, that begin with the same {load.shared_tokens:,} tokens, then "
        f"{load.own_tokens:,} of their own; {least} to {most} more in each turn, {load.answer_tokens[0]} to {load.answer_tokens[1]} out."
    )


def rate_loads(size: Size, one_per_s: float) -> list[Load]:
    """Rising request rates. ``one_per_s``: what one engine completes of ``size.random``."""
    loads = []
    for share in size.rates:
        per_s = share * one_per_s
        run = Random(
            size.random.prompt_tokens, size.random.answer_tokens, max(8, round(per_s * size.rate_s)), per_s=per_s
        )
        said = f"`vllm bench serve`, Poisson arrivals, {run.requests} requests."
        loads.append(Load(f"{per_s:.1f} requests/s", said, run, "rate"))
    return loads
