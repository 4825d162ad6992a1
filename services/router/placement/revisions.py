"""Which model a request means, and which of its revisions serves a conversation while several run side by side.

Weighted rendezvous hashing: each conversation draws a number for every revision from its own beginning only. So all
routers agree, all turns of a conversation go to the revision that has its KV, and a changed share moves as few
conversations as possible.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from typing import Any

import msgspec

from services.router.request.facts import RequestFacts
from services.router.request.fields import given
from services.router.state.revision_names import ANY, means
from shared.contracts.engine_paths import CHAT

SHARE_MAX = 1e6
REVISIONS_MAX = 16
"""Revisions of one model; a rollout has two."""
MODELS_MAX = 256
BEGINNING_BYTES = 256
"""The beginning of a prompt that is not a chat: about the text of its first KV block."""


class Turn(msgspec.Struct):
    """The fields of a chat message that are read here."""

    role: Any = None
    content: msgspec.Raw = msgspec.Raw(b"")


TURNS = msgspec.json.Decoder(list[Turn])


class Shares(msgspec.Struct, frozen=True, kw_only=True):
    """The share of conversations of each revision. For a model without shares, cost decides."""

    models: dict[str, dict[str, float]] = {}

    def order(self, facts: RequestFacts) -> tuple[str, ...]:
        """The revisions that may serve the request, the drawn one first; the others serve while no worker of that one
        is ready. Empty: any revision.
        """
        shares = self.of(facts.model)
        if not shares:
            return ()
        beginning = beginning_of(facts)
        drawn = sorted((_draw(beginning, name) / share, name) for name, share in shares.items() if share > 0)
        return (*(name for _drawn, name in drawn), ANY)

    def of(self, model: str) -> Mapping[str, float]:
        """Shares by revision. A request without a model means the only model."""
        if not model and len(self.models) == 1:
            return next(iter(self.models.values()))
        return self.models.get(model, {})

    def share(self, model: str, revision: str) -> float | None:
        """Share of the model's conversations, 0.0 to 1.0, while all revisions have workers; None: cost decides."""
        shares = self.of(model)
        if not shares:
            return None
        return sum(share for name, share in shares.items() if means(name, revision)) / sum(shares.values())


NO_SHARES = Shares()


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
        return _through_first_user_message(body.messages)
    return bytes(memoryview(body.prompt)[:BEGINNING_BYTES])


def read_shares(text: str) -> Shares:
    """From the operator's JSON; no shares when empty. Raises ValueError with a message for the operator."""
    try:
        models = msgspec.json.decode(text.strip().encode() or b"{}", type=dict[str, dict[str, float]])
    except msgspec.DecodeError as error:
        raise ValueError(f'{error}; it is written like {{"my-model": {{"v1": 90, "v2": 10}}}}') from error
    if len(models) > MODELS_MAX:
        raise ValueError(f"there are {len(models)} models, {MODELS_MAX} are the maximum")
    for model, shares in models.items():
        _check(model, shares)
    return Shares(models=models)


def _check(model: str, shares: dict[str, float]) -> None:
    if not model or ANY in shares:
        raise ValueError("a model or a revision has an empty name")
    if len(shares) > REVISIONS_MAX:
        raise ValueError(f"{model} has {len(shares)} revisions, {REVISIONS_MAX} are the maximum")
    for revision, share in shares.items():
        if not 0 <= share <= SHARE_MAX:
            raise ValueError(f"the share of {model}'s {revision} is {share:g}; it must be 0 to {SHARE_MAX:g}")
    if not any(shares.values()):
        raise ValueError(f"no revision of {model} has a share above 0; leave the model out to let cost decide")


def _through_first_user_message(messages: msgspec.Raw) -> bytes:
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
    """Exponentially distributed over conversations: divided by its share, a revision's number is the smallest of all
    with a probability proportional to the share.
    """
    digest = hashlib.blake2b(beginning, digest_size=8, key=hashlib.sha256(revision.encode()).digest()).digest()
    return -math.log((int.from_bytes(digest, "big") + 1) / (1 << 64))
