"""Requests that an engine died of, as far as the router knows: refused for a while, so that none kills the next one.

A request is known by a digest of its body without the fields that only name its sender: another tenant's copy is
refused as well. Some of these requests were only computed beside the one that was at fault, so a first quarantine is
short; each further death makes it longer, and a success ends it. It also ends when a worker that seemed to have died
reports again.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import msgspec

from shared.bounded import Bounded
from shared.contracts.ids import Epoch, WorkerId

DIGEST_BYTES = 16
QUARANTINED_MAX = 1024
"""Requests remembered; the oldest are dropped."""
AGAIN_FACTOR = 4.0
"""How much longer each further quarantine of the same request is."""
QUARANTINE_S_MAX = 3600.0
REMEMBERED_S = 3600.0
"""How long after its quarantine a request's deaths are remembered."""
SENDERS_OWN = frozenset(
    {"baton", "cache_salt", "metadata", "prompt_cache_key", "request_id", "safety_identifier", "user"}
)
"""Fields of a body that an engine does not compute."""

Life = tuple[WorkerId, Epoch]
"""One life of a worker."""

_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])


class QuarantinedRequest(msgspec.Struct):
    """One request."""

    until: float
    deaths: int


class Quarantine:
    """Which requests are refused, and until when (seconds on the monotonic clock)."""

    def __init__(self, first_s: float) -> None:
        """``first_s``: the first quarantine of a request; 0: none is ever refused."""
        self._first_s = min(first_s, QUARANTINE_S_MAX)
        self.entries = Bounded[bytes, QuarantinedRequest](QUARANTINED_MAX)
        """Requests that are remembered, refused or not."""
        self._blamed_for = Bounded[Life, set[bytes]](QUARANTINED_MAX)
        """Requests that are refused because these lives seem to have ended."""

    def add(self, digest: bytes, now: float, lives: Sequence[Life] = ()) -> float:
        """An engine died of this request, or may have; returns for how many seconds it is refused. ``lives``: of
        workers that fell silent, so that their ends are likely and not certain.
        """
        known = self.entries.pop(digest, None)
        deaths = known.deaths + 1 if known is not None and now < known.until + REMEMBERED_S else 1
        for_s = min(QUARANTINE_S_MAX, self._first_s * AGAIN_FACTOR ** (deaths - 1))
        self.entries[digest] = QuarantinedRequest(now + for_s, deaths)
        self._remember(digest, lives)
        return for_s

    def heard(self, digest: bytes, for_s: float, now: float, lives: Sequence[Life] = ()) -> None:
        """Another router has quarantined it."""
        known = self.entries.pop(digest, None) or QuarantinedRequest(0.0, 1)
        known.until = max(known.until, now + min(max(0.0, for_s), QUARANTINE_S_MAX))
        self.entries[digest] = known
        self._remember(digest, lives)

    def reported(self, worker_id: WorkerId, epoch: Epoch) -> None:
        """A worker has reported: it has not died. Costs nothing while no request is refused for its silence."""
        if self._blamed_for:
            for digest in self._blamed_for.pop((worker_id, epoch), ()):
                self.entries.pop(digest, None)

    def _remember(self, digest: bytes, lives: Sequence[Life]) -> None:
        for life in lives:
            digests = self._blamed_for.pop(life, None) or set()
            if len(digests) < QUARANTINED_MAX:
                digests.add(digest)
            self._blamed_for[life] = digests

    def refused_s(self, digest: bytes, now: float) -> float:
        """For how many seconds more the request is refused; 0 when it is not."""
        known = self.entries.get(digest)
        return max(0.0, known.until - now) if known is not None and self._first_s else 0.0

    def succeeded(self, digest: bytes) -> None:
        """An engine has served the request to its end."""
        self.entries.pop(digest, None)


def digest_of(path: str, body: bytes) -> bytes:
    """What a client's repeated request has in common with its first."""
    digest = blake2b(path.encode(), digest_size=DIGEST_BYTES)
    try:
        fields = _fields.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        digest.update(body)
        return digest.digest()
    for name in sorted(fields.keys() - SENDERS_OWN):
        digest.update(b"\0%b\0" % name.encode(errors="surrogatepass"))
        digest.update(fields[name])
    return digest.digest()
