"""An engine that only waits for other workers sleeps, and input or a wake-up ends the sleep at once."""

from __future__ import annotations

import queue
import threading
from types import SimpleNamespace


def new_idle_wait():
    from connector.scheduler.engine_loop import IdleWait  # Imports vLLM.

    return IdleWait()


def waiting():
    inbox = queue.Queue()
    idle_wait = new_idle_wait()
    idle_wait.attach_to(SimpleNamespace(input_queue=inbox))
    idle_wait.begin_step()
    return idle_wait, inbox


def ends(idle_wait, inbox, cause, waits: int = 1) -> bool:
    """Whether it ends all of its waits when ``cause`` is called in each."""
    waiter = threading.Thread(target=lambda: [idle_wait.wait() for _ in range(waits)])
    waited = inbox.not_empty.wait

    def cause_while_waiting(_s):  # Runs as soon as the engine waits: without a notification it would wait forever.
        threading.Thread(target=cause).start()
        return waited(None)

    inbox.not_empty.wait = cause_while_waiting
    waiter.start()
    waiter.join(5.0)
    return not waiter.is_alive()


def test_input_ends_the_wait():
    idle_wait, inbox = waiting()

    assert ends(idle_wait, inbox, lambda: inbox.put("request"), waits=1000)


def test_queued_input_prevents_the_wait():
    idle_wait, inbox = waiting()
    inbox.not_empty.wait = lambda _s: 1 / 0
    inbox.put("request")

    idle_wait.wait()


def test_no_wait_follows_a_step_that_computed():
    idle_wait, inbox = waiting()
    inbox.not_empty.wait = lambda _s: 1 / 0
    idle_wait.note_step(scheduled_tokens=1)

    idle_wait.wait()


def test_a_noted_change_prevents_the_next_wait():
    idle_wait, inbox = waiting()
    inbox.not_empty.wait = lambda _s: 1 / 0
    idle_wait.note_change()

    idle_wait.wait()


def test_wake_ends_the_wait():
    idle_wait, inbox = waiting()

    assert ends(idle_wait, inbox, idle_wait.wake)


def test_wake_before_the_wait_prevents_it():
    idle_wait, inbox = waiting()
    inbox.not_empty.wait = lambda _s: 1 / 0
    idle_wait.wake()

    idle_wait.wait()


def test_wake_without_a_queue_does_nothing():
    idle_wait = new_idle_wait()

    idle_wait.wake()

    assert not idle_wait.is_attached


def test_an_engine_without_a_queue_does_not_wait():
    idle_wait = new_idle_wait()
    idle_wait.begin_step()

    idle_wait.wait()
