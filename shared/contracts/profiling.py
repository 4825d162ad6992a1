"""Profiles of engines: an operator starts and stops the engines' profilers and reads the traces that they wrote."""

from __future__ import annotations

import msgspec

from shared.contracts.ids import Epoch, RequestId, WorkerId
from shared.contracts.inference import LegKind
from shared.contracts.message import Message
from shared.contracts.workers import Role

PROFILE_S_MAX = 300.0
"""Longest time after which a profile ends by itself."""
PROFILE_STEPS_MAX = 10_000
"""Greatest number of engine steps in one profile."""
TRACE_BYTES_MAX = 512 * 1024 * 1024
"""Size of a trace, before compression, beyond which a worker deletes it."""
TRACES_MAX = 64
"""Traces of one worker: one for each rank of its engine."""
PART_BYTES_MAX = 512 * 1024
LEGS_NOTED_MAX = 2000
"""Legs that one worker notes in a profile; later ones are left out."""
PARTS_NOTED_MAX = 32
"""Intervals of one leg that a profile shows."""


class StartProfile(Message, frozen=True, kw_only=True):
    """Operator -> worker: start the engine's profiler. The traces of an earlier profile are deleted."""

    worker_id: WorkerId
    profile_id: str
    """Name of the profile, equal on all workers."""
    s_max: float
    """Time after which the worker stops the profiler by itself, at most ``PROFILE_S_MAX``."""
    steps_max: int
    """Steps after which the engine stops recording, at most ``PROFILE_STEPS_MAX``."""


class StopProfile(Message, frozen=True, kw_only=True):
    """Operator -> worker: stop the profiler, if it still runs, and say what it wrote."""

    worker_id: WorkerId


class LegPart(Message, frozen=True, kw_only=True):
    """An interval of a leg: its queue, prefill or decode, or a lease, wait or read of KV."""

    name: str
    """The name that the interval has in traces of requests."""
    began_ns: int
    """Wall clock, as all instants of a profile."""
    ended_ns: int


class ProfiledLeg(Message, frozen=True, kw_only=True):
    """A leg that ran while its worker was profiled."""

    request_id: RequestId
    """The id that the client's answer and all log lines have; the legs of one request share it."""
    kind: LegKind
    began_ns: int
    ended_ns: int
    """The end of the profile for a leg that was still running."""
    first_token_ns: int = 0
    """0: no token came."""
    trace_id: str = ""
    parts: list[LegPart] = msgspec.field(default_factory=list)


class ProfileStopped(Message, frozen=True, kw_only=True):
    """Worker -> operator: what the newest profile consists of."""

    worker_id: WorkerId
    epoch: Epoch
    profile_id: str = ""
    role: Role = Role.BOTH
    model: str = ""
    engine: str = ""
    """The engine's name and its profiler."""
    host: str = ""
    began_ns: int = 0
    ended_ns: int = 0
    traces: list[int] = msgspec.field(default_factory=list)
    """Size of each trace in bytes, compressed; at most ``TRACES_MAX``."""
    legs: list[ProfiledLeg] = msgspec.field(default_factory=list)
    """The legs in the order of their ends, at most ``LEGS_NOTED_MAX``."""
    legs_left_out: int = 0
    note: str = ""
    """Remark for people, such as why there is no trace."""
    refusal: str = ""
    """Why there is no profile, for people."""


class ReadTrace(Message, frozen=True, kw_only=True):
    """Operator -> worker: asks for a part of a trace of the newest profile."""

    worker_id: WorkerId
    profile_id: str
    trace: int
    """Index in ``ProfileStopped.traces``."""
    offset: int


class TracePart(Message, frozen=True, kw_only=True):
    """Worker -> operator: up to ``PART_BYTES_MAX`` bytes; none at the end."""

    worker_id: WorkerId
    epoch: Epoch
    data: bytes = b""
    refusal: str = ""
    """Why there are none, for people."""
