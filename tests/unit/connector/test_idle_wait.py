"""An engine that only waits for other workers rests, and misses nothing."""

from __future__ import annotations

import queue
import threading
from types import SimpleNamespace

from connector.scheduler.idle_wait import IdleWait


def resting():
    inbox = queue.Queue()
    idle_wait = IdleWait()
    idle_wait.attach_to(SimpleNamespace(input_queue=inbox))
    idle_wait.note_step(scheduled_tokens=0)
    return idle_wait, inbox


def test_what_comes_ends_the_rest():
    idle_wait, inbox = resting()
    rests = threading.Thread(target=lambda: [idle_wait.wait() for _ in range(1000)])
    waited = inbox.not_empty.wait

    def comes(_s):  # As soon as the engine waits: without a notification it would wait for ever.
        threading.Thread(target=inbox.put, args=("request",)).start()
        return waited(None)

    inbox.not_empty.wait = comes
    rests.start()
    rests.join(5.0)

    assert not rests.is_alive()


def test_what_has_come_already_is_not_waited_for():
    idle_wait, inbox = resting()
    inbox.not_empty.wait = lambda _s: 1 / 0
    inbox.put("request")

    idle_wait.wait()


def test_a_step_that_computed_is_followed_by_the_next_one_at_once():
    idle_wait, inbox = resting()
    inbox.not_empty.wait = lambda _s: 1 / 0
    idle_wait.note_step(scheduled_tokens=1)

    idle_wait.wait()


def test_whatever_stirs_is_looked_at_before_the_next_rest():
    idle_wait, inbox = resting()
    inbox.not_empty.wait = lambda _s: 1 / 0
    idle_wait.note_change()

    idle_wait.wait()


def test_a_ring_ends_the_rest():
    idle_wait, inbox = resting()
    rests = threading.Thread(target=idle_wait.wait)
    waited = inbox.not_empty.wait

    def is_rung(_s):  # As soon as the engine waits: without a notification it would wait for ever.
        threading.Thread(target=idle_wait.wake).start()
        return waited(None)

    inbox.not_empty.wait = is_rung
    rests.start()
    rests.join(5.0)

    assert not rests.is_alive()


def test_a_ring_before_the_rest_is_not_slept_through():
    idle_wait, inbox = resting()
    inbox.not_empty.wait = lambda _s: 1 / 0
    idle_wait.wake()

    idle_wait.wait()


def test_a_ring_is_heard_by_nobody_where_the_queue_is_not_known():
    idle_wait = IdleWait()

    idle_wait.wake()

    assert not idle_wait.is_attached


def test_an_engine_whose_queue_is_not_known_goes_on():
    idle_wait = IdleWait()
    idle_wait.note_step(scheduled_tokens=0)

    idle_wait.wait()
