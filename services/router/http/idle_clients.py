"""Clients that hold a connection and get nothing for it: those that ask for nothing, and those that do not read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class Client(Protocol):
    """What is asked of a connection."""

    @property
    def busy(self) -> bool:
        """Whether an answer is owed."""

    def unsent_bytes(self) -> int:
        """What still waits for the client to read."""

    def head_is_late(self) -> None:
        """No request came in time: end it."""

    def reader_is_late(self) -> None:
        """It did not read in time: drop the connection with all that it has not sent."""


class IdleClients:
    """The clients that are waited for, the longest wait first."""

    def __init__(self, now: Callable[[], float], *, head_s_max: float, read_s_max: float) -> None:
        self._now = now
        self._head_s_max = head_s_max
        self._read_s_max = read_s_max
        self._asking: dict[Client, float] = {}
        """Since when nothing is owed to them and the head of their next request is not complete."""
        self._reading: dict[Client, float] = {}
        """Since when they do not read: their answer is complete, or cannot go on."""

    def waits_for_head(self, client: Client) -> None:
        """It may ask, or finish asking, within ``head_s_max``."""
        self._asking.setdefault(client, self._now())

    def head_came(self, client: Client) -> None:
        """It asked."""
        if self._asking:
            self._asking.pop(client, None)

    def waits_for_reader(self, client: Client) -> None:
        """It may read what was written to it within ``read_s_max``."""
        self._reading.setdefault(client, self._now())

    def has_read(self, client: Client) -> None:
        """It caught up."""
        self._reading.pop(client, None)

    def left(self, client: Client) -> None:
        """Its connection is gone."""
        self._asking.pop(client, None)
        self._reading.pop(client, None)

    def end_late(self) -> None:
        """End those whose time is over."""
        now = self._now()
        for client in _older(self._asking, now - self._head_s_max):
            del self._asking[client]
            if client.busy:  # It sends the next request bit by bit while it gets an answer: its time begins after that.
                self._asking[client] = now
            else:
                client.head_is_late()
        for client in [client for client in self._reading if not client.unsent_bytes()]:
            del self._reading[client]
        for client in _older(self._reading, now - self._read_s_max):
            del self._reading[client]
            client.reader_is_late()


def _older(since: dict[Client, float], than: float) -> list[Client]:
    """The times grow from first to last."""
    found: list[Client] = []
    for client, at in since.items():
        if at >= than:
            break
        found.append(client)
    return found
