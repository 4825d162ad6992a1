"""An engine that only waits for other workers rests, and misses nothing."""

from __future__ import annotations

import queue
import threading
from types import SimpleNamespace

from connector.scheduler.idle_wait import IdleWait


def resting():
    inbox = queue.Queue()
    rest = IdleWait()
    rest.in_front_of(SimpleNamespace(input_queue=inbox))
    rest.stepped(scheduled_tokens=0)
    return rest, inbox


def test_what_comes_ends_the_rest():
    rest, inbox = resting()
    rests = threading.Thread(target=lambda: [rest.take() for _ in range(1000)])
    waited = inbox.not_empty.wait

    def comes(_s):  # As soon as the engine waits: without a notification it would wait for ever.
        threading.Thread(target=inbox.put, args=("request",)).start()
        return waited(None)

    inbox.not_empty.wait = comes
    rests.start()
    rests.join(5.0)

    assert not rests.is_alive()


def test_what_has_come_already_is_not_waited_for():
    rest, inbox = resting()
    inbox.not_empty.wait = lambda _s: 1 / 0
    inbox.put("request")

    rest.take()


def test_a_step_that_computed_is_followed_by_the_next_one_at_once():
    rest, inbox = resting()
    inbox.not_empty.wait = lambda _s: 1 / 0
    rest.stepped(scheduled_tokens=1)

    rest.take()


def test_whatever_stirs_is_looked_at_before_the_next_rest():
    rest, inbox = resting()
    inbox.not_empty.wait = lambda _s: 1 / 0
    rest.stir()

    rest.take()


def test_a_ring_ends_the_rest():
    rest, inbox = resting()
    rests = threading.Thread(target=rest.take)
    waited = inbox.not_empty.wait

    def is_rung(_s):  # As soon as the engine waits: without a notification it would wait for ever.
        threading.Thread(target=rest.ring).start()
        return waited(None)

    inbox.not_empty.wait = is_rung
    rests.start()
    rests.join(5.0)

    assert not rests.is_alive()


def test_a_ring_before_the_rest_is_not_slept_through():
    rest, inbox = resting()
    inbox.not_empty.wait = lambda _s: 1 / 0
    rest.ring()

    rest.take()


def test_a_ring_is_heard_by_nobody_where_the_queue_is_not_known():
    rest = IdleWait()

    rest.ring()

    assert not rest.can_be_rung


def test_an_engine_whose_queue_is_not_known_goes_on():
    rest = IdleWait()
    rest.stepped(scheduled_tokens=0)

    rest.take()
