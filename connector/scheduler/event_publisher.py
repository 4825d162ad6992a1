"""vLLM's publisher of KV events, without its thread for each batch.

vLLM hands each step's events to a thread, which competes with the thread that schedules for the interpreter and the
core only to pack and queue a few hundred bytes: 0.1 ms of CPU for an answer of one token. Here the thread that
schedules does it; ZMQ's own thread writes to the socket. The thread of vLLM's publisher only answers requests for a
replay.
"""

from __future__ import annotations

import logging
import threading

import msgspec
import zmq
from vllm.distributed.kv_events import EventBatch, EventPublisherFactory, ZmqEventPublisher
from zmq.constants import Flag

NAME = "baton"
"""Name of the publisher in vLLM's configuration."""
REPLAY_POLL_MS = 100
"""How soon the thread notices that it must end; vLLM's looks as often."""

log = logging.getLogger("baton.connector")


class StepEventPublisher(ZmqEventPublisher):
    """Same endpoints and messages as vLLM's."""

    def __init__(self, data_parallel_rank: int = 0, **options: object) -> None:  # noqa: ARG002  # vLLM's name
        self._encode = msgspec.msgpack.Encoder().encode
        self._lock = threading.Lock()
        """Held where the events that are kept for replays are read or changed."""
        # Each engine has endpoints of its own. By the rank in a data parallel group vLLM would look for other ports.
        super().__init__(0, **options)

    def publish(self, events: EventBatch) -> None:
        """Send a step's events. What ZMQ does not take, the reader finds missing and asks for.

        Raises RuntimeError after ``shutdown``.
        """
        if not self._running:
            raise RuntimeError("the publisher of KV events is closed")
        if events.data_parallel_rank is None:
            events.data_parallel_rank = self._data_parallel_rank
        payload = self._encode(events)
        with self._lock:
            number = next(self._seq_gen)
            self._buffer.append((number, payload))
        try:
            self._pub.send_multipart((self._topic_bytes, number.to_bytes(8, "big"), payload), Flag.NOBLOCK)
        except zmq.error.ZMQError as error:
            log.warning("KV events %d were not sent: %s", number, error)

    def shutdown(self) -> None:
        self._running = False
        self._thread.join(timeout=self.SHUTDOWN_TIMEOUT)
        for socket in (self._pub, self._replay):
            if socket is not None:
                socket.close(linger=0)

    def _publisher_thread(self) -> None:
        while self._running and self._replay is not None:
            try:
                if self._replay.poll(REPLAY_POLL_MS):
                    self._service_replay()
            except zmq.error.ZMQError as error:
                log.warning("a replay of KV events failed: %s", error)

    def _service_replay(self) -> None:
        """As vLLM's, which sends while it reads what is kept: the thread that schedules must not wait for that."""
        request = self._replay.recv_multipart()
        if len(request) != 3:
            log.warning("a request for KV events has %d parts instead of 3", len(request))
            return
        client, empty, first = request
        with self._lock:
            kept = list(self._buffer)
        for number, payload in kept:
            if number >= int.from_bytes(first, "big"):
                self._replay.send_multipart((client, empty, self._topic_bytes, number.to_bytes(8, "big"), payload))
        self._replay.send_multipart((client, empty, b"", self.END_SEQ, b""))


def register_publisher() -> None:
    """Make vLLM know the publisher by its name, in this process. Does nothing the second time."""
    if NAME not in EventPublisherFactory._registry:
        EventPublisherFactory.register_publisher(NAME, StepEventPublisher)
