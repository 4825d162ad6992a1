"""The names of things on the wire. Each id is one subject token: no dots, spaces or wildcards."""

from __future__ import annotations

import re
from typing import NewType

WorkerId = NewType("WorkerId", str)
"""A worker process beside one engine; kept across restarts of the process."""
RouterId = NewType("RouterId", str)
"""One life of one router process."""
RequestId = NewType("RequestId", str)
"""A client's request, as the client sees it; shared by all its legs."""
LegId = NewType("LegId", str)
"""One leg (prefill, decode or aggregated) of a request: 128 random bits. A prefill leg's offer of KV has its id too."""
NO_LEG = LegId("")
"""Says that a message names no leg."""
DecisionId = NewType("DecisionId", str)
"""One placement: the id of the router that made it, ``-d`` and 128 random bits. Another tenant's cannot be guessed."""
Epoch = NewType("Epoch", int)
"""One life of a worker process: milliseconds since 1970 at its start, so a later life has a larger epoch."""

DECISION_ID = re.compile(r"([A-Za-z0-9_-]{1,128})-d[0-9a-f]{32}")
MODEL_ALIAS = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/+-]{0,127}")
ALIAS_RULE = "up to 128 letters, digits and ._:/+- that begin with a letter or digit"
SUBJECT_TOKEN = re.compile(r"[A-Za-z0-9_-]{1,128}")


def is_subject_token(text: str) -> bool:
    """Whether an id may stand in a subject."""
    return SUBJECT_TOKEN.fullmatch(text) is not None


def is_model_alias(text: str) -> bool:
    """Whether a model may have this further name (``ALIAS_RULE``)."""
    return MODEL_ALIAS.fullmatch(text) is not None


def router_of(decision_id: str) -> RouterId:
    """The router that made the decision; empty when ``decision_id`` is not the id of a decision."""
    match = DECISION_ID.fullmatch(decision_id)
    return RouterId(match[1] if match is not None else "")
