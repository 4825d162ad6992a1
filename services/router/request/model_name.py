"""Replaces the name that a request gives to its model by the model's primary name."""

from __future__ import annotations

from typing import Final

import msgspec

from services.router.request.facts import Fault, RequestFacts
from services.router.state.cluster_view import ClusterView

NAME_ONE: Final = Fault(param="model", message="There are several models here: name one. /v1/models lists them.")


def with_primary_name(facts: RequestFacts, cluster: ClusterView) -> RequestFacts:
    """The request under its model's primary name. With a fault if it names none, and there are several."""
    if facts.model:
        primary = cluster.primary_name(facts.model)
        return facts if primary == facts.model else msgspec.structs.replace(facts, model=primary, alias=facts.model)
    if facts.body is not None and facts.fault is None and len(cluster.models()) > 1:
        return msgspec.structs.replace(facts, fault=NAME_ONE)
    return facts
