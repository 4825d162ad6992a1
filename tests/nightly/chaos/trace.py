"""A trace made by the project itself: conversations that grow turn by turn, under a load that rises and falls."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from shared.contracts.engine_paths import COMPLETIONS, MESSAGES, RESPONSES
from tests.nightly.chaos.keys import REVOCABLE, STEADY
from tests.nightly.chaos.oracle import ADAPTER, MODEL, OTHER_MODEL, Oracle

TURNS_MAX = 5
PROMPT_TOKENS_MAX = 3000
FIRST_TOKEN_ID = 10
"""The ids before it are special."""
LARGE_BYTES = (150_000, 250_000)
"""A large prompt's text has between so many bytes."""
LONG_TOKENS = 400
"""Wanted by a client that leaves before it has them."""
LEAVES_S = (0.05, 3.0)
BATCH_LINES = 10

Chat = tuple[tuple[str, str], ...]
"""Roles and texts."""


class Client(StrEnum):
    """What a conversation's client does."""

    COMPLETIONS = "completions"
    RESPONSES = "responses"
    MESSAGES = "messages"
    LARGE = "large"
    """One completion of a prompt of hundreds of kilobytes."""
    LEAVING = "leaving"
    """Like any other, but it leaves before its answer ends."""
    LARGE_LEAVING = "large and leaving"
    OTHER = "other"
    """Completions of the second model."""
    ADAPTER = "adapter"
    """Completions with a LoRA adapter."""


CLIENTS = {
    Client.COMPLETIONS: 8,
    Client.RESPONSES: 3,
    Client.MESSAGES: 3,
    Client.LARGE: 1,
    Client.LEAVING: 2,
    Client.LARGE_LEAVING: 1,
}
"""How many conversations of each kind come while all kinds come once."""
MODELS = {Client.COMPLETIONS: MODEL, Client.OTHER: OTHER_MODEL, Client.ADAPTER: ADAPTER}
"""Of completions, turn by turn."""
PATHS = {Client.RESPONSES: RESPONSES, Client.MESSAGES: MESSAGES}
"""Of what is asked otherwise than by completions."""


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
    kept_share: float = 0.3
    """Conversations whose client keeps its connection from turn to turn."""
    revocable_share: float = 0.25
    """Conversations with an API key that may be revoked."""
    other_cards: int = 0
    """How often conversations with the second model come; see ``CLIENTS``."""
    adapter_cards: int = 0
    batch_every_s: float = 0.0
    """In the mean, from one batch to the next; the first comes at the beginning. 0: there are none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request, with the only right answer."""

    number: int
    at_s: float
    conversation: int
    prompt: tuple[int, ...] | str | Chat = field(repr=False)
    max_tokens: int
    stream: bool
    answer: str = field(repr=False)
    path: str = COMPLETIONS
    model: str = MODEL
    keeps: bool = False
    """The client keeps its connection, and uses the one of the conversation's turn before."""
    key: str = STEADY
    """Sent where clients need one."""
    leaves_after_s: float | None = None
    """The client closes its connection so long after it has sent the request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One batch; its lines are completions that are not streamed."""

    number: int
    at_s: float
    lines: tuple[Ask, ...] = field(repr=False)


def make_trace(shape: Shape, oracle: Oracle) -> list[Ask]:
    """All requests in the order in which they are sent."""
    chance = random.Random(shape.seed)
    maker = _Maker(shape, chance, oracle)
    asks: list[Ask] = []
    kinds = _deck(shape, chance)
    for conversation, begins_at in enumerate(_starts(shape, chance)):
        key = REVOCABLE if chance.random() < shape.revocable_share else STEADY
        asks += (replace(ask, key=key) for ask in maker.conversation(conversation, begins_at, next(kinds)))
    asks.sort(key=lambda ask: ask.at_s)
    return [replace(ask, number=number) for number, ask in enumerate(asks)]


def make_batches(shape: Shape, oracle: Oracle) -> list[Batch]:
    """All batches of the same shape."""
    chance = random.Random(f"batches {shape.seed}")
    maker = _Maker(shape, chance, oracle)
    batches: list[Batch] = []
    at_s = 0.5
    while shape.batch_every_s and at_s < shape.seconds:
        lines = tuple(maker.line(number) for number in range(BATCH_LINES))
        batches.append(Batch(number=len(batches), at_s=at_s, lines=lines))
        at_s += chance.uniform(0.5, 1.5) * shape.batch_every_s
    return batches


class _Maker:
    """Makes requests and their answers."""

    def __init__(self, shape: Shape, chance: random.Random, oracle: Oracle) -> None:
        self._shape = shape
        self._chance = chance
        self._oracle = oracle
        self._systems = [self._tokens(chance.randint(40, 500)) for _ in range(shape.systems)]
        self._texts = [oracle.text(oracle.sayable(system)) for system in self._systems]

    def conversation(self, number: int, begins_at: float, client: Client) -> Iterator[Ask]:
        """Its turns, until the trace ends or the history is too long."""
        chance = self._chance
        keeps = chance.random() < self._shape.kept_share
        if client in PATHS:
            return self._chat(number, begins_at, PATHS[client], keeps=keeps)
        if client in MODELS:
            return self._completions(number, begins_at, MODELS[client], keeps=keeps)
        is_leaving = client is not Client.LARGE
        prompt: tuple[int, ...] | str
        if client is Client.LEAVING:
            prompt = (*chance.choice(self._systems), *self._tokens(_long_tailed(chance, self._shape.user_tokens)))
        else:
            prompt = self._oracle.long_text(chance, chance.randint(*LARGE_BYTES))
        wanted = LONG_TOKENS if is_leaving else self._wanted()
        ask = self._ask(number, begins_at, prompt, wanted)
        leaves = chance.uniform(*LEAVES_S) if is_leaving else None
        return iter([replace(ask, keeps=keeps, leaves_after_s=leaves)])

    def line(self, number: int) -> Ask:
        """One line of a batch."""
        prompt = (*self._chance.choice(self._systems), *self._tokens(20))
        return replace(self._ask(number, 0.0, prompt, self._wanted()), number=number, stream=False)

    def _completions(self, conversation: int, at_s: float, model: str, *, keeps: bool) -> Iterator[Ask]:
        history = list(self._chance.choice(self._systems))
        for at in self._turns(at_s):
            history += self._tokens(_long_tailed(self._chance, self._shape.user_tokens))
            if len(history) > PROMPT_TOKENS_MAX:
                return
            wanted = self._wanted()
            answer = self._oracle.answer(history, wanted, model)
            yield replace(self._ask(conversation, at, tuple(history), wanted, answer), model=model, keeps=keeps)
            history += answer

    def _chat(self, conversation: int, at_s: float, path: str, *, keeps: bool) -> Iterator[Ask]:
        """Turns of a chat begin with its first question: Anthropic's system prompt is another field."""
        chat: list[tuple[str, str]] = []
        for at in self._turns(at_s):
            asked = self._oracle.sayable(self._tokens(_long_tailed(self._chance, self._shape.user_tokens)))
            beginning = "" if chat else self._chance.choice(self._texts)
            chat.append(("user", beginning + self._oracle.text(asked)))
            if len(self._oracle.tokens(tuple(chat))) > PROMPT_TOKENS_MAX:
                return
            ask = self._ask(conversation, at, tuple(chat), self._wanted())
            yield replace(ask, path=path, keeps=keeps)
            chat.append(("assistant", ask.answer))

    def _turns(self, at_s: float) -> Iterator[float]:
        chance = self._chance
        for _ in range(chance.randint(1, TURNS_MAX)):
            if at_s >= self._shape.seconds:
                return
            yield at_s
            at_s += 0.5 + chance.expovariate(1.0 / self._shape.think_s)

    def _ask(
        self,
        conversation: int,
        at_s: float,
        prompt: tuple[int, ...] | str | Chat,
        wanted: int,
        answer: Sequence[int] | None = None,
    ) -> Ask:
        found = self._oracle.answer(self._oracle.tokens(prompt), wanted) if answer is None else answer
        return Ask(
            number=0,
            at_s=at_s,
            conversation=conversation,
            prompt=prompt,
            max_tokens=wanted,
            stream=self._chance.random() < self._shape.streamed_share,
            answer=self._oracle.text(found),
        )

    def _wanted(self) -> int:
        return min(self._shape.answer_tokens_max, _long_tailed(self._chance, self._shape.answer_tokens))

    def _tokens(self, count: int) -> list[int]:
        return [self._chance.randrange(FIRST_TOKEN_ID, self._oracle.model.size) for _ in range(count)]


def _deck(shape: Shape, chance: random.Random) -> Iterator[Client]:
    """Kinds of clients without end, each as often as it has cards."""
    counts = {**CLIENTS, Client.OTHER: shape.other_cards, Client.ADAPTER: shape.adapter_cards}
    cards = [client for client, count in counts.items() for _ in range(count)]
    while True:
        yield from chance.sample(cards, len(cards))


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
