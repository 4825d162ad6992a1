"""The health that a router reports with its status: the workers whose state it does not know exactly."""

from __future__ import annotations

from itertools import islice

from services.router.state.block_table import IS_COMPILED
from services.router.state.prefix_index import IndexState, PrefixIndex
from services.router.tokenize.parity import Parity, ParityBook
from shared.contracts.control import ROUTER_TROUBLES_MAX, RouterHealth


def health_of(index: PrefixIndex, parity: ParityBook) -> RouterHealth:
    """The present health."""
    inexact = ((worker_id, one.state) for worker_id, one in index.entries.items() if one.state is not IndexState.EXACT)
    differing = (worker_id for worker_id, one in parity.states.items() if one.parity is Parity.DIFFERS)
    return RouterHealth(
        not_exact={worker_id: state.value for worker_id, state in islice(inexact, ROUTER_TROUBLES_MAX)},
        tokens_differ=list(islice(differing, ROUTER_TROUBLES_MAX)),
        is_index_compiled=IS_COMPILED,
    )
