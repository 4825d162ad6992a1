"""One worker as the router knows it: its record, its load report, its speed, and the work sent to it since: legs, own
legs, and a rate of tokens.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from typing import Final

from services.router.state.fleet_table import FleetTable
from shared.contracts.ids import Epoch
from shared.contracts.load import WorkerLoad
from shared.contracts.workers import LoraAdapter, Role, WorkerPhase, WorkerRecord

READY: Final = WorkerPhase.READY

CONNECTOR: Final = "baton"
"""Names of connectors that lease, offer and fetch KV by content begin with it."""
REPORT_LAG_S: Final = 0.02
"""A load report may miss a leg that was sent up to this long before the report arrived."""
SENT_MAX: Final = 4096
"""Legs counted for a worker between two of its reports. Beyond that the oldest are dropped."""
MARKS: Final = tuple(sorted({max(1, each << octave >> 2) for octave in range(21) for each in range(4, 8)}))
"""Depths of prompts, in blocks, that ``RunningPrompts`` notes: 1 to 8, then four in each doubling."""
MEMORY_S: Final = 10.0
"""Time constant of the decay of a ``TokenRate``."""


def can_exchange_kv(record: WorkerRecord) -> bool:
    """Whether its engine can be asked for KV by content."""
    return record.fingerprint.connector.startswith(CONNECTOR)


class WorkerView:
    """One epoch of a worker."""

    has_reported = False
    """Whether a report has come. This attribute and those up to ``_kv_free_tokens`` hold the last report, which itself
    is not kept: it would be freed when the next one comes, when its memory is in no cache any more."""
    reported_ready = False
    reported_waiting = 0
    """Requests in its engine's queue."""
    kv_used = 0.0
    """Share of its KV cache in use; 0.0 where that is not known."""
    _reported_legs = 0
    _reported_requests = 0
    _reported_waiting_tokens = 0
    _kv_used_tokens = 0
    _kv_free_tokens = math.inf
    lost = False
    away = False
    """Whether the worker has not reported since a bus outage, and so may not have reconnected."""
    registered = True
    written_ready = False
    """The value of ``ready`` in the fleet table."""

    def __init__(self, record: WorkerRecord, row: int, now: float) -> None:
        self.renew(record)
        self.row = row
        self.heard_at = now
        self.own = OwnWork()
        self.prompts = TokenRate()
        """Rate of computed prompt tokens."""

    def report(self, load: WorkerLoad) -> None:
        """A load report has come."""
        used, total, waiting = load.kv_tokens_used, load.kv_tokens_total, load.waiting
        self.has_reported = True
        self.reported_ready = load.can_serve
        self.reported_waiting = waiting
        self.kv_used = used / total if total else 0.0
        self._reported_legs = load.legs
        self._reported_requests = load.running + waiting
        self._reported_waiting_tokens = load.waiting_tokens
        self._kv_used_tokens = used
        self._kv_free_tokens = float(total - used) if total else math.inf

    def renew(self, record: WorkerRecord) -> None:
        """A record of this epoch. A starting worker does not know its fingerprint yet."""
        self.record = record
        self.pairs_with = record.fingerprint.key()
        """The fingerprint in one string: KV moves only between equal ones."""
        self.adapters: dict[str, LoraAdapter] = {adapter.name: adapter for adapter in record.adapters}

    def offers(self, model: str) -> bool:
        """Whether requests for ``model`` may be placed here: it is a name of the model, or an adapter."""
        return model in self.record.models or model in self.adapters

    def digest_of(self, model: str) -> str:
        """The digest of an adapter's files; empty when ``model`` is no adapter here."""
        adapter = self.adapters.get(model)
        return "" if adapter is None or model in self.record.models else adapter.digest

    def hashed_adapter(self, model: str) -> tuple[str, str] | None:
        """What the engine hashes for an adapter's requests (``HashKeys.lora``); None when ``model`` is no adapter."""
        adapter = self.adapters.get(model)
        return None if adapter is None or model in self.record.models else (adapter.name, adapter.hashed_as)

    @property
    def legs(self) -> int:
        """Legs that it serves, as far as this router knows; one with several sequences counts as that many."""
        own = self.own
        return max(self._reported_legs + own.sent_legs, own.legs)

    @property
    def serves(self) -> bool:
        """A store has no engine and takes no legs."""
        return self.record.role is not Role.STORE

    @property
    def ready(self) -> bool:
        """Whether it is READY by its record and its report, reachable, and its engine answers."""
        if self.record.phase is not READY or self.lost or self.away:
            return False
        return self.reported_ready or not self.has_reported

    def fit(self, now: float, silent_s_max: float) -> bool:
        """Whether new legs may be placed there."""
        return self.serves and self.ready and now - self.heard_at <= silent_s_max

    def write_load(self, table: FleetTable) -> None:
        """Write what it is doing into its row. Without a report only this router's own legs are known."""
        own = self.own
        if not self.has_reported:
            table.set_load(self.row, self.legs, own.legs, own.tokens, own.context_tokens, math.inf, own.tokens)
            return
        table.set_load(
            self.row,
            self.legs,
            max(self._reported_requests + own.sent_legs, own.legs),
            self._reported_waiting_tokens + own.sent_tokens,
            self._kv_used_tokens + own.sent_context_tokens,
            self._kv_free_tokens - own.sent_context_tokens,
            own.sent_tokens,
        )

    def write_report(self, table: FleetTable, prompts_per_s: float, evicted: int, restored: int) -> None:
        """Write what a report has changed into its row; see ``FleetTable`` for the other numbers."""
        own = self.own
        table.set_report(
            self.row,
            self.heard_at,
            prompts_per_s,
            evicted,
            restored,
            self.legs,
            max(self._reported_requests + own.sent_legs, own.legs),
            self._reported_waiting_tokens + own.sent_tokens,
            self._kv_used_tokens + own.sent_context_tokens,
            self._kv_free_tokens - own.sent_context_tokens,
            own.sent_tokens,
        )


class Sent:
    """A leg that no load report contains yet."""

    __slots__ = ("at", "context_tokens", "epoch", "hashes", "legs", "tokens")

    def __init__(self, at: float, tokens: int, context_tokens: int, legs: int = 1, hashes: Sequence[int] = ()) -> None:
        self.at = at
        self.hashes = hashes
        """Hashes of the blocks of its prompt, as far as they are known."""
        self.epoch = Epoch(0)
        """Epoch of its worker."""
        self.legs = legs
        """One for each of its sequences."""
        self.tokens = tokens
        """Prompt tokens to compute."""
        self.context_tokens = context_tokens
        """Prompt and completion tokens that will occupy the KV cache, beside those that running legs hold already."""


class RunningPrompts:
    """Which prompts the legs of this router hold in the KV cache of one worker. Only some of their depths are noted, so
    that a leg of 512 blocks takes microseconds; a fifth of what legs share may be missed.
    """

    __slots__ = ("_legs",)

    def __init__(self) -> None:
        self._legs: dict[int, int] = {}
        """How many legs have a prompt with this block, by its hash, and so all blocks before it."""

    def add(self, hashes: Sequence[int]) -> None:
        """A leg with these blocks has started."""
        legs = self._legs
        for mark in MARKS[: bisect_right(MARKS, len(hashes))]:
            name = hashes[mark - 1]
            legs[name] = legs.get(name, 0) + 1

    def remove(self, hashes: Sequence[int]) -> None:
        """A leg with these blocks has ended. It was added, unless the worker was forgotten and seen again meanwhile."""
        legs = self._legs
        for mark in MARKS[: bisect_right(MARKS, len(hashes))]:
            name = hashes[mark - 1]
            if (left := legs.get(name, 0) - 1) > 0:
                legs[name] = left
            else:
                legs.pop(name, None)

    def shared(self, hashes: Sequence[int]) -> int:
        """How many of these blocks, from the first, a noted leg has."""
        low, high = 0, bisect_right(MARKS, len(hashes)) if self._legs else 0
        while low < high:
            middle = (low + high) // 2
            if hashes[MARKS[middle] - 1] in self._legs:
                low = middle + 1
            else:
                high = middle
        return MARKS[low - 1] if low else 0


class OwnWork:
    """Work on one worker: this router's legs, and in ``sent_*`` legs of all routers that its last report lacks."""

    __slots__ = (
        "_sent",
        "context_tokens",
        "legs",
        "prompts",
        "sent_context_tokens",
        "sent_legs",
        "sent_tokens",
        "tokens",
    )

    def __init__(self) -> None:
        self.legs = 0
        self.tokens = 0
        self.context_tokens = 0
        self.prompts = RunningPrompts()
        self.sent_legs = 0
        self.sent_tokens = 0
        self.sent_context_tokens = 0
        self._sent: deque[Sent] = deque()

    def started(self, sent: Sent) -> None:
        """The router itself sent a leg."""
        self.legs += sent.legs
        self.tokens += sent.tokens
        self.context_tokens += sent.context_tokens
        self.prompts.add(sent.hashes)
        self.others_started(sent)

    def others_started(self, sent: Sent) -> None:
        """Any router sent a leg."""
        if len(self._sent) >= SENT_MAX:
            self._forget(self._sent.popleft())
        self._sent.append(sent)
        self.sent_legs += sent.legs
        self.sent_tokens += sent.tokens
        self.sent_context_tokens += sent.context_tokens

    def computed(self, sent: Sent, tokens: int) -> None:
        """The leg has computed its prompt of ``tokens``."""
        self.tokens -= tokens
        self.sent_tokens -= sent.tokens
        sent.tokens = 0

    def ended(self, sent: Sent, context_tokens: int, legs: int = 1, tokens: int = 0) -> None:
        """The leg has ended; it counted as ``legs``, and its prompt still as ``tokens``."""
        self.legs -= legs
        self.tokens -= tokens
        self.context_tokens -= context_tokens
        self.prompts.remove(sent.hashes)
        self._forget(sent)

    def reported(self, now: float) -> None:
        """A load report arrived. It contains the legs sent until ``REPORT_LAG_S`` ago."""
        while self._sent and self._sent[0].at <= now - REPORT_LAG_S:
            self._forget(self._sent.popleft())

    def _forget(self, sent: Sent) -> None:
        self.sent_legs -= sent.legs
        self.sent_tokens -= sent.tokens
        self.sent_context_tokens -= sent.context_tokens
        sent.legs = sent.tokens = sent.context_tokens = 0


class TokenRate:
    """Tokens per second, as a decaying mean, from a running total that is reported from time to time."""

    __slots__ = ("_at", "_per_s", "_total")

    def __init__(self) -> None:
        self._total = 0
        self._at = math.nan
        self._per_s = 0.0

    def update(self, total: int, now: float) -> float:
        """Add the total at ``now``; returns the rate. A smaller total than before (after a restart) starts anew."""
        took_s = now - self._at
        if math.isnan(took_s) or total < self._total:
            self._total, self._at = total, now
        elif took_s > 0.0:
            kept = math.exp(-took_s / MEMORY_S)
            self._per_s = kept * self._per_s + (1.0 - kept) * (total - self._total) / took_s
            self._total, self._at = total, now
        return self._per_s
