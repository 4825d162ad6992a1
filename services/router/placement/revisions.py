"""Two revisions of a model side by side: which one serves a conversation.

Each conversation draws a number for every revision from nothing but its own beginning, so all routers agree, all its
turns go to the revision that has its KV, and a share that changes moves no more conversations than it has to.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from typing import Any

import msgspec

from services.router.placement.request_fields import CHAT, RequestFacts, given

SHARE_MAX = 1e6
REVISIONS_MAX = 16
"""Of one model; an upgrade has two."""
MODELS_MAX = 256
ANY = ""
"""Stands for every revision, those without a share too."""
BEGINNING_BYTES = 256
"""Of a prompt that is no chat: about what its first block of KV holds."""
ABBREVIATED_MIN = 7
"""Digits of a commit or digest that may stand for all of it."""
HEXADECIMAL = frozenset("0123456789abcdef")


class Turn(msgspec.Struct):
    """A message of a chat, as far as it matters here."""

    role: Any = None
    content: msgspec.Raw = msgspec.Raw(b"")


TURNS = msgspec.json.Decoder(list[Turn])


class Shares(msgspec.Struct, frozen=True, kw_only=True):
    """What the operator wants each revision of a model to serve. Of models that are not named: whatever costs least."""

    models: dict[str, dict[str, float]] = msgspec.field(default_factory=dict)

    def order(self, facts: RequestFacts) -> tuple[str, ...]:
        """The revisions that may serve it, the one that shall first; the others are for when no worker of that one is
        ready. Empty: all the same.
        """
        shares = self.of(facts.model)
        if not shares:
            return ()
        beginning = beginning_of(facts)
        drawn = sorted((_draw(beginning, name) / share, name) for name, share in shares.items() if share > 0)
        return (*(name for _drawn, name in drawn), ANY)

    def of(self, model: str) -> Mapping[str, float]:
        """By revision. A request that names no model means the only one that there is."""
        if not model and len(self.models) == 1:
            return next(iter(self.models.values()))
        return self.models.get(model, {})

    def share(self, model: str, revision: str) -> float | None:
        """Of all conversations of that model, 0.0 to 1.0, as long as all revisions have workers; None: as it comes."""
        shares = self.of(model)
        if not shares:
            return None
        return sum(share for name, share in shares.items() if means(name, revision)) / sum(shares.values())


NO_SHARES = Shares()


def means(name: str, revision: str) -> bool:
    """Whether the operator's name for a revision means that one: in full, or the first digits of a commit or digest."""
    if name in (ANY, revision):
        return True
    return len(name) >= ABBREVIATED_MIN and revision.startswith(name) and HEXADECIMAL.issuperset(revision)


def beginning_of(facts: RequestFacts) -> bytes:
    """What all turns of a conversation have in common, and other conversations do not: the client's own name for it,
    or in a chat all up to the first thing that the user said. (What comes before that, or the first block of KV, is
    often the same for all users.)
    """
    body = facts.body
    if body is None:
        return b""
    if isinstance(body.prompt_cache_key, str) and body.prompt_cache_key:
        return body.prompt_cache_key.encode()
    if facts.path == CHAT and given(body.messages):
        return _until_the_user_spoke(body.messages)
    return bytes(memoryview(body.prompt)[:BEGINNING_BYTES])


def read_shares(text: str) -> Shares:
    """Shares from the operator's JSON; none when empty. Raises ValueError in words for the operator."""
    try:
        models = msgspec.json.decode(text.strip().encode() or b"{}", type=dict[str, dict[str, float]])
    except msgspec.DecodeError as error:
        raise ValueError(f'{error}; it is written like {{"my-model": {{"v1": 90, "v2": 10}}}}') from error
    if len(models) > MODELS_MAX:
        raise ValueError(f"there are {len(models)} models, {MODELS_MAX} at most make sense")
    for model, shares in models.items():
        _check(model, shares)
    return Shares(models=models)


def _check(model: str, shares: dict[str, float]) -> None:
    if not model or ANY in shares:
        raise ValueError("a model or a revision has an empty name")
    if len(shares) > REVISIONS_MAX:
        raise ValueError(f"{model} has {len(shares)} revisions, {REVISIONS_MAX} at most make sense")
    for revision, share in shares.items():
        if not 0 <= share <= SHARE_MAX:
            raise ValueError(f"the share of {model}'s {revision} is {share:g}; it must be 0 to {SHARE_MAX:g}")
    if not any(shares.values()):
        raise ValueError(f"no revision of {model} has a share above 0; leave the model out to let cost decide")


def _until_the_user_spoke(messages: msgspec.Raw) -> bytes:
    try:
        turns = TURNS.decode(messages)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return bytes(memoryview(messages)[:BEGINNING_BYTES])
    said = []
    for turn in turns:
        said.append(bytes(turn.content))
        if turn.role == "user":
            break
    return b"\n".join(said)


def _draw(beginning: bytes, revision: str) -> float:
    """A number that is exponentially distributed over conversations: divided by their shares, each of several such
    numbers is the least as often as its share says.
    """
    digest = hashlib.blake2b(beginning, digest_size=8, key=hashlib.sha256(revision.encode()).digest()).digest()
    return -math.log((int.from_bytes(digest, "big") + 1) / (1 << 64))
