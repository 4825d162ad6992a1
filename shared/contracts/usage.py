"""What each API key has used of each model: reported by routers, added up in the ledger by metrics collectors.

The ledger is a key-value bucket with one entry for each UTC month, tenant, key and model. A router numbers its reports
and repeats one until it is stored. An entry remembers the last report of each router that it contains, so no report
counts twice: neither one that is repeated, nor one that several collectors store.
"""

from __future__ import annotations

import hashlib
import operator

from msgspec.structs import astuple

from shared.contracts.ids import RouterId
from shared.contracts.message import Message, PackedMessage

MONTH_CHARS = len("2026-11")
COUNT_MAX = 1 << 40
"""Maximum count of tokens in one request. A larger one in a worker's report is an error."""
NAME_CHARS_MAX = 256
ROWS_PER_REPORT_MAX = 256
LEDGER_DAYS = 400
"""An entry expires so long after it was last changed: 13 months."""
LEDGER_BYTES_MAX = 64 * 1024 * 1024
"""Size of the whole ledger; an entry with each day of a month has about 2 KiB."""


class UsageCounts(PackedMessage, frozen=True, kw_only=True):
    """What some requests have used."""

    requests: int = 0
    """All that ended, the next two included."""
    failed: int = 0
    """Answered with an error, or broken off by one."""
    cancelled: int = 0
    """Requests whose client left."""
    prompt_tokens: int = 0
    """Cached ones included."""
    cached_tokens: int = 0
    """Found in the cache of the worker that computed the prompt."""
    completion_tokens: int = 0
    prefill_s: float = 0.0
    """Estimated time that engines spent on the prompts, by their learned speeds, times their ranks: GPU seconds."""
    decode_s: float = 0.0
    """Estimated time that engines spent on the completions, times their ranks: of each decode step the request's
    share."""

    def __add__(self, other: UsageCounts) -> UsageCounts:
        names = UsageCounts.__struct_fields__
        return UsageCounts(**dict(zip(names, map(operator.add, astuple(self), astuple(other)), strict=True)))

    @property
    def tokens(self) -> int:
        """What a budget counts."""
        return self.prompt_tokens + self.completion_tokens


class UsageRow(Message, frozen=True, kw_only=True):
    """What one key used of one model on one day."""

    day: str
    """Day in UTC: 2026-11-23. A request counts on the day on which it ends."""
    tenant: str
    """Tenant of the key; empty without a key."""
    key: str
    """Name or id of the API key, never the key itself; empty without a key."""
    model: str
    """Empty where no model served the request."""
    counts: UsageCounts
    monthly_tokens: int = 0
    """Budget of the key; 0: none."""

    @property
    def month(self) -> str:
        return self.day[:MONTH_CHARS]

    @property
    def entry_id(self) -> str:
        """Id of the ledger's entry that the report belongs to."""
        return entry_id(self.month, self.tenant, self.key, self.model)


class ReportUsage(Message, frozen=True, kw_only=True):
    """Router -> metrics collectors: what the requests that ended here have used. Repeated until it is stored."""

    router_id: RouterId
    number: int
    """Counts the router's reports from 1."""
    rows: list[UsageRow]
    """At most ``ROWS_PER_REPORT_MAX``, of different entries or days."""


class UsageStored(Message, frozen=True, kw_only=True):
    """The report is in the ledger."""

    router_id: RouterId
    number: int


class UsageMonth(Message, frozen=True, kw_only=True):
    """An entry of the ledger: one month of one key and model."""

    entry: str
    """See ``entry_id``."""
    month: str
    """Month in UTC: 2026-11."""
    tenant: str
    key: str
    model: str
    days: dict[str, UsageCounts]
    """Counts by day of the month: 01 to 31."""
    stored: dict[str, int]
    """Number of the last report of each router, by its id, that is contained here."""
    monthly_tokens: int = 0
    """Budget of the key in the last report; 0: none."""

    @property
    def total(self) -> UsageCounts:
        """Counts of the whole month."""
        return sum(self.days.values(), UsageCounts())


def entry_id(month: str, tenant: str, key: str, model: str) -> str:
    """A subject token that begins with the month."""
    named = f"{tenant}\0{key}\0{model}".encode(errors="surrogatepass")
    return f"{month}-{hashlib.blake2b(named, digest_size=12).hexdigest()}"
