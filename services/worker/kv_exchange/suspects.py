"""The peers that this worker's engines were connecting to when they died.

The worker's process ends with its engine, so they are in a file, and the next process refuses them for a while: a peer
that ends an engine which connects to it must not end the next one.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from datetime import UTC, datetime

import msgspec

from services.worker.kv_exchange.peers import REFUSED_S
from shared.contracts.ids import WorkerId
from shared.runtime.clock import Clock
from shared.runtime.state_folder import suspects_file

log = logging.getLogger("baton.worker")


class Suspects:
    """If the folder is not writable, the next process does not know them."""

    def __init__(self, state_dir: str, worker_id: str, clock: Clock) -> None:
        self._file = suspects_file(state_dir, worker_id)
        self._clock = clock
        now_ms = clock.wall_ms()
        longest_ms = now_ms + REFUSED_S * 1000
        self._until_ms = {
            suspect: until_ms for suspect, until_ms in self._read().items() if now_ms < until_ms <= longest_ms
        }
        self.note = ""
        """What operators should know of them."""
        if self._until_ms:
            until = datetime.fromtimestamp(max(self._until_ms.values()) / 1000, UTC)
            self.note = (
                f"its engine died while it connected to {', '.join(sorted(self._until_ms))}: it reads no KV from there"
                f" before {until:%H:%M:%S} UTC"
            )
            log.warning("%s", self.note)

    def refused_s(self) -> dict[WorkerId, float]:
        """For how long each is still to be refused."""
        now_ms = self._clock.wall_ms()
        return {suspect: (until_ms - now_ms) / 1000 for suspect, until_ms in self._until_ms.items()}

    def add(self, peers: Collection[WorkerId]) -> None:
        """An engine died while it connected to these."""
        if not peers:
            return
        log.error("the engine died while it connected to %s", ", ".join(sorted(peers)))
        until_ms = self._clock.wall_ms() + int(REFUSED_S * 1000)
        self._until_ms |= dict.fromkeys(peers, until_ms)
        draft = self._file.with_suffix(".draft")
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            draft.write_bytes(msgspec.json.encode(self._until_ms))
            draft.replace(self._file)
        except OSError as error:
            log.warning("the next process will connect to them, too: %s", error)

    def _read(self) -> dict[WorkerId, int]:
        try:
            return msgspec.json.decode(self._file.read_bytes(), type=dict[WorkerId, int])
        except FileNotFoundError:
            return {}
        except (OSError, msgspec.DecodeError) as error:
            log.warning("it cannot be read which peers an engine died of: %s", error)
            return {}
