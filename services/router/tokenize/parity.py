"""Do the engines make of a prompt what the router makes of it? Who was asked, who differs, who is to be asked again.

A worker that differs spoils its whole fingerprint: prompts are tokenized before it is known who will serve them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import StrEnum
from json import dumps
from typing import NamedTuple

from services.router.placement.request_fields import CHAT, COMPLETIONS
from shared.contracts.control import ProbePrompt, PromptTokens
from shared.contracts.ids import Epoch, WorkerId
from shared.contracts.kv_events import unpack_hashes

ASK_AGAIN_S = 30.0
"""A worker that differs is asked again after so long, and one that did not answer."""
CHARS_MIN = 3000
"""Of the long probe: more than one piece of text (see ``segments``)."""
CHARS_PER_TOKEN_MAX = 6
"""Of the probes' text, with any tokenizer: so many characters make at least one token."""
BLOCKS_PROBED = 3

PROSE = "The rain had stopped before noon, and the orchard behind the mill smelled of wet leaves and apples. "
MIXTURE = (
    "It's 3.14159 or 1234567, l'été, naïve ÅÄÖ, 漢字とかな, привет 🙂👩\u200d👧!\n\n"
    "\tdef f(x):\n\t    return x  **  2  # ok\r\n  two  spaces,\u00a0no-break — “quotes” …   "
    'https://example.org/a_b?c=1&d=[2] {"k": null}\n'
)


class Parity(StrEnum):
    """What is known of one life of a worker."""

    UNKNOWN = "unknown"
    """Not asked yet, or it does not answer."""
    AGREES = "agrees"
    DIFFERS = "differs"


class ParityState(NamedTuple):
    """One worker's."""

    epoch: Epoch
    fingerprint: str
    parity: Parity
    ask_at: float
    """When to ask it next."""


NEVER = float("inf")


class ParityBook:
    """Every worker's standing. Time is given."""

    def __init__(self) -> None:
        self.standings: dict[WorkerId, ParityState] = {}
        self._differing: frozenset[str] = frozenset()

    def seen(self, worker_id: WorkerId, epoch: Epoch, fingerprint: str) -> bool:
        """A worker is there. Answers whether it is to be asked: it is new, or has begun a new life."""
        known = self.standings.get(worker_id)
        if known is not None and known.epoch >= epoch:
            return False
        self._put(worker_id, ParityState(epoch, fingerprint, Parity.UNKNOWN, 0.0))
        return True

    def keep(self, worker_ids: Iterable[WorkerId]) -> None:
        """All others are gone."""
        for worker_id in self.standings.keys() - set(worker_ids):
            del self.standings[worker_id]
        self._count()

    def due(self, now: float) -> list[WorkerId]:
        """Whom to ask now."""
        return [worker_id for worker_id, standing in self.standings.items() if standing.ask_at <= now]

    def next_at(self) -> float:
        """When somebody is to be asked next."""
        return min((standing.ask_at for standing in self.standings.values()), default=NEVER)

    def found(self, worker_id: WorkerId, epoch: Epoch, parity: Parity, now: float) -> bool:
        """What came of asking. Answers whether this is news to be told."""
        known = self.standings.get(worker_id)
        if known is None or known.epoch != epoch:
            return False
        ask_at = NEVER if parity is Parity.AGREES else now + ASK_AGAIN_S
        if parity is Parity.UNKNOWN and known.parity is Parity.DIFFERS:
            parity = Parity.DIFFERS  # silence takes nothing back
        self._put(worker_id, known._replace(parity=parity, ask_at=ask_at))
        return parity is not known.parity

    def leave(self, worker_id: WorkerId) -> None:
        """It cannot be asked as things are; ``ask_all`` brings it back."""
        known = self.standings.get(worker_id)
        if known is not None:
            self.standings[worker_id] = known._replace(ask_at=NEVER)

    def ask_all(self, fingerprint: str) -> None:
        """Its tokenizer is another one now."""
        for worker_id, standing in self.standings.items():
            if standing.fingerprint == fingerprint:
                self.standings[worker_id] = standing._replace(ask_at=0.0)

    def parity(self, worker_id: WorkerId) -> Parity:
        """What is known of a worker."""
        known = self.standings.get(worker_id)
        return Parity.UNKNOWN if known is None else known.parity

    def trusted(self, fingerprint: str) -> bool:
        """Whether no worker of it differs."""
        return fingerprint not in self._differing

    def _put(self, worker_id: WorkerId, standing: ParityState) -> None:
        self.standings[worker_id] = standing
        self._count()

    def _count(self) -> None:
        standings = self.standings.values()
        self._differing = frozenset(one.fingerprint for one in standings if one.parity is Parity.DIFFERS)


def probes(model: str, *, block_size: int, max_model_len: int) -> list[ProbePrompt]:
    """Prompts of each kind that routers tokenize: what any tokenizer or template may treat in its own way."""
    chars = min(max(CHARS_MIN, BLOCKS_PROBED * block_size * CHARS_PER_TOKEN_MAX), max_model_len)
    long = (PROSE * (chars // len(PROSE) + 1))[:chars]
    mixed = (MIXTURE * (chars // (4 * len(MIXTURE)) + 1))[:chars]
    turns = [
        {"role": "system", "content": "You are terse."},
        {"role": "user", "content": long[: chars // 2]},
        {"role": "assistant", "content": " Well. "},
        {"role": "user", "content": [{"type": "text", "text": mixed[: chars // 2]}]},
    ]
    return [
        _probe(COMPLETIONS, model=model, prompt=long),
        _probe(COMPLETIONS, model=model, prompt=mixed, add_special_tokens=False),
        _probe(COMPLETIONS, model=model, prompt=long[: chars // 2], cache_salt="a tenant of its own"),
        _probe(CHAT, model=model, messages=turns),
        _probe(CHAT, model=model, messages=turns[1:], add_generation_prompt=False, cache_salt="sält"),
    ]


def _probe(path: str, **fields: object) -> ProbePrompt:
    return ProbePrompt(path=path, body=dumps(fields).encode())


def difference(theirs: PromptTokens, tokens: int, hashes: Sequence[int]) -> str:
    """How an engine's word differs from the router's own; empty when it does not. Raises ValueError."""
    if theirs.refusal:
        return ""  # it will refuse requests like this one, whoever places them
    if len(theirs.tokens) != tokens:
        return f"{len(theirs.tokens)} tokens there, {tokens} here"
    there = list(unpack_hashes(theirs.hashes))
    if there != list(hashes):
        pairs = zip(there, hashes, strict=False)
        same = next((n for n, (one, two) in enumerate(pairs) if one != two), min(len(there), len(hashes)))
        return f"{len(there)} blocks there, {len(hashes)} here, of which the first {same} are the same"
    return ""
