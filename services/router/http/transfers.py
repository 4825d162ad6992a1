"""Files that a router receives or sends at a time: how many, in all and of one tenant, and how slow clients may be."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from shared.http.errors import HttpError, error_body

AT_ONCE_MAX, TENANT_AT_ONCE_MAX = 128, 16
RESERVED = 32
"""The last of all are for tenants without any."""
GRACE_S, BYTES_PER_S_MIN = 30.0, 16 * 1024
"""Seconds that a client may take besides, and its least rate."""


class Transfers:
    """Those of one direction."""

    def __init__(self, what: str) -> None:
        """``what``: for clients, such as "uploads"."""
        self._what = what
        self._count: Counter[str] = Counter()
        """Running transfers, by tenant."""

    def refusal(self, tenant: str) -> HttpError | None:
        """Why the tenant may have no further one now; None when it may."""
        own, total = self._count[tenant], self._count.total()
        if own >= TENANT_AT_ONCE_MAX:
            message = f"{TENANT_AT_ONCE_MAX} {self._what} of this tenant are running. Try again when one has ended."
            return self._refused(429, message)
        if total >= (AT_ONCE_MAX - RESERVED if own else AT_ONCE_MAX):
            return self._refused(503, f"The router has too many {self._what}. Try again shortly.")
        return None

    @contextmanager
    def one_of(self, tenant: str) -> Iterator[None]:
        """Count one of the tenant's until it has ended."""
        self._count[tenant] += 1
        try:
            yield
        finally:
            self._count[tenant] -= 1
            if not self._count[tenant]:
                del self._count[tenant]

    def _refused(self, status: int, message: str) -> HttpError:
        return HttpError(status, error_body(status, message, code=f"too_many_{self._what}"), 5.0)


class Pace:
    """Measures a client: the time for which the router waits for it, and the bytes that come or go meanwhile."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._waited_s = 0.0
        self.moved = 0
        """Bytes so far."""

    @contextmanager
    def waiting(self) -> Iterator[None]:
        begun = self._now()
        try:
            yield
        finally:
            self._waited_s += self._now() - begun

    @property
    def is_slow(self) -> bool:
        return self._waited_s > GRACE_S + self.moved / BYTES_PER_S_MIN
