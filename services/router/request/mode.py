"""Which mode a request asks for: in its body, in its header, or by the operator's default."""

from __future__ import annotations

from typing import Final

from services.router.request.facts import Mode, RequestFacts
from shared.contracts.control import DEFAULT_MODES, DefaultMode

AUTO: Final = Mode.AUTO
AGGREGATED: Final = Mode.AGGREGATED


def requested_mode(facts: RequestFacts, header: Mode) -> Mode:
    """From the body, or else the header. A request with a cache hit threshold is to be refused rather than have its
    prompt computed, so it gets no prefill leg, which would compute it: one worker decides by what it holds and can
    fetch.
    """
    asked = facts.options.mode or header
    return AGGREGATED if asked is AUTO and facts.cache_hit_threshold else asked


def default_or_requested(facts: RequestFacts, header: Mode, default: Mode) -> Mode:
    """The header's mode, or else the operator's default. The default does not apply to a body that names workers or
    sets a cache hit threshold.
    """
    free = header is AUTO and facts.options.forced is None and not facts.cache_hit_threshold
    return default if free else header


def default_mode_of(stored: DefaultMode | None) -> Mode:
    """The operator's default mode; AUTO when none, or no valid one, is stored."""
    return Mode(stored.mode) if stored is not None and stored.mode in DEFAULT_MODES else AUTO
