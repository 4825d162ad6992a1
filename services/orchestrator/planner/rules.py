"""What the planner goes by: targets, limits, and how slow it is to change its mind."""

from __future__ import annotations

import msgspec


class Rules(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds, shares and workers. Every number has an ``ORCHESTRATOR_PLANNER_*`` variable (see ``settings``)."""

    ttft_s: float = 2.0
    """The time to the first token that 95 of 100 requests should have; 0: none is promised."""
    itl_s: float = 0.05
    """The time between tokens up to which decode batches may grow; 0: none is promised."""
    load_max: float = 0.85
    """A role with more load than this is too small: beyond it queues grow at the slightest unevenness."""
    clear_s: float = 60.0
    """In so many seconds a queue that has built up should be gone: its work counts as demand in that measure."""
    window_s: float = 30.0
    """Over which work and demand are averaged."""
    lasting_s: float = 15.0
    """More is wanted when all looks of so long a time say so."""
    spare_s: float = 60.0
    """A worker may change its role when all looks of so long a time could have done without it."""
    hold_s: float = 300.0
    """A worker may go when all looks of so long a time could have done without it."""
    cool_down_s: float = 60.0
    """After a change, and after a new leader's begin, so long nothing is changed: first its effect must show."""
    refused_s: float = 120.0
    """A change that was refused is not asked for again for so long; each time in a row for twice as long."""
    start_s_max: float = 600.0
    """A worker that was asked for and has not come by then is no longer counted on."""
    prefill_min: int = 1
    decode_min: int = 1
    workers_min: int = 1
    """Of one fleet, all roles together."""
    workers_max: int = 0
    """0: as many as can be had."""
    step_max: int = 4
    """Workers asked for at once."""
