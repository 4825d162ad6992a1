"""A trace made by the project itself: conversations that grow turn by turn, under a load that rises and falls."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field

from tests.nightly.chaos.oracle import Oracle

TURNS_MAX = 5
PROMPT_TOKENS_MAX = 3000
FIRST_TOKEN_ID = 10
"""The ids before it are special."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What a trace is like. It says everything: equal shapes make equal traces."""

    seed: int
    seconds: float
    requests_per_s: float
    """In the mean; the load swings between half and one and a half of it."""
    swing_s: float = 20.0
    """From one peak of the load to the next."""
    systems: int = 6
    """Different system prompts, which many conversations share."""
    user_tokens: float = 120.0
    answer_tokens: float = 24.0
    """In the mean, both."""
    answer_tokens_max: int = 96
    think_s: float = 2.0
    streamed_share: float = 0.7


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request, with the only right answer."""

    number: int
    at_s: float
    conversation: int
    prompt: tuple[int, ...] = field(repr=False)
    max_tokens: int
    stream: bool
    answer: str = field(repr=False)


def make_trace(shape: Shape, oracle: Oracle) -> list[Ask]:
    """All requests in the order in which they are sent."""
    chance = random.Random(shape.seed)
    tokens = _Tokens(chance, oracle.model.size)
    systems = [tokens.some(chance.randint(40, 500)) for _ in range(shape.systems)]
    asks: list[Ask] = []
    for conversation, begins_at in enumerate(_starts(shape, chance)):
        history, at_s = list(chance.choice(systems)), begins_at
        for _ in range(chance.randint(1, TURNS_MAX)):
            history += tokens.some(_long_tailed(chance, shape.user_tokens))
            wanted = min(shape.answer_tokens_max, _long_tailed(chance, shape.answer_tokens))
            if at_s >= shape.seconds or len(history) > PROMPT_TOKENS_MAX:
                break
            answer = oracle.answer(history, wanted)
            ask = Ask(
                number=0,
                at_s=at_s,
                conversation=conversation,
                prompt=tuple(history),
                max_tokens=wanted,
                stream=chance.random() < shape.streamed_share,
                answer=oracle.text(answer),
            )
            asks.append(ask)
            history += answer
            at_s += 0.5 + chance.expovariate(1.0 / shape.think_s)
    asks.sort(key=lambda ask: ask.at_s)
    return [_numbered(ask, number) for number, ask in enumerate(asks)]


class _Tokens:
    def __init__(self, chance: random.Random, vocabulary: int) -> None:
        self._chance = chance
        self._vocabulary = vocabulary

    def some(self, count: int) -> list[int]:
        return [self._chance.randrange(FIRST_TOKEN_ID, self._vocabulary) for _ in range(count)]


def _starts(shape: Shape, chance: random.Random) -> Iterator[float]:
    """When conversations begin: a Poisson process whose rate swings, thinned from its highest."""
    mean = shape.requests_per_s / ((1 + TURNS_MAX) / 2)
    at_s = 0.0
    while (at_s := at_s + chance.expovariate(1.5 * mean)) < shape.seconds:
        rate = mean * (1.0 + 0.5 * math.sin(2 * math.pi * at_s / shape.swing_s))
        if chance.random() < rate / (1.5 * mean):
            yield at_s


def _long_tailed(chance: random.Random, mean: float) -> int:
    return max(1, round(chance.lognormvariate(math.log(mean) - 0.32, 0.8)))


def _numbered(ask: Ask, number: int) -> Ask:
    values = {name: getattr(ask, name) for name in Ask.__slots__}
    return Ask(**{**values, "number": number})
