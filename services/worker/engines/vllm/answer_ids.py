"""Ids that vLLM's server draws for an answer and its parts. Both legs of a resumed stream must draw the same ones."""

from __future__ import annotations

import uuid
from types import SimpleNamespace
from uuid import UUID

import vllm.utils

from services.worker.engines.port import CURRENT_LEG


def derive_ids() -> None:
    """From now on the ids of ``vllm.utils.random_uuid`` follow from the current leg's ``answer_id``, if it has one.

    The modules of vLLM's server have imported that function by name, so that what it calls is replaced: nothing else in
    its module uses ``uuid``.
    """
    vllm.utils.uuid = SimpleNamespace(uuid4=_drawn)


def _drawn() -> UUID:
    leg = CURRENT_LEG.get()
    return leg.draw_id() if leg is not None and leg.answer_id else uuid.uuid4()
