"""Calls of the worker are carried out while a step is computed, once each, in their order, and never beside the scheduler."""

from __future__ import annotations

import queue
import threading
from types import SimpleNamespace

import pytest

CALLS = 3000
SOON_S = 30.0


class Core:
    """EngineCore as far as it takes requests."""

    def __init__(self) -> None:
        self.kinds = pytest.importorskip("vllm.v1.engine").EngineCoreRequestType
        from connector.scheduler.engine_loop import CallsDuringSteps  # imports vLLM: only for the tests that run it

        self.input_queue: queue.Queue = queue.Queue()
        self.calls = CallsDuringSteps()
        self.calls.attach_to(self)
        self.handled: list[int] = []
        self.scheduling = False

    def execute_dummy_batch(self) -> None:
        """A call comes meanwhile."""
        self.send(1)
        assert self.handled == [1]

    def _handle_client_request(self, _kind, request) -> None:
        assert not self.scheduling, "a call ran beside the scheduler"
        self.handled.append(request[1])

    def send(self, number: int, method: str = "kv_exchange") -> None:
        """As the thread that receives requests does."""
        self.input_queue.put_nowait((self.kinds.UTILITY, [0, number, method, ()]))

    def begin(self) -> None:
        """``schedule`` ends."""
        with self.calls.lock:
            self.calls.begin()

    def end(self) -> None:
        """``update_from_output`` begins."""
        with self.calls.lock:
            self.calls.end()

    def handle_waiting(self) -> None:
        """As EngineCore does between steps."""
        while not self.input_queue.empty():
            self._handle_client_request(*self.input_queue.get_nowait())


@pytest.fixture
def core() -> Core:
    return Core()


def test_a_call_is_carried_out_while_other_engines_of_a_data_parallel_group_compute(core: Core):
    core.execute_dummy_batch()
    core.send(2)

    assert core.handled == [1]


def test_a_call_is_carried_out_while_a_step_is_computed(core: Core):
    core.begin()
    core.send(1)

    assert core.handled == [1]
    assert core.input_queue.empty()


def test_a_call_waits_while_the_scheduler_works(core: Core):
    core.send(1)
    core.begin()
    core.end()
    core.send(2)

    assert core.handled == [1], "the one that waited when the step was made"
    core.handle_waiting()
    assert core.handled == [1, 2]


def test_other_requests_wait_for_the_step(core: Core):
    core.begin()
    core.send(1, method="reset_prefix_cache")
    core.input_queue.put_nowait((core.kinds.ABORT, ["r1"]))

    assert core.handled == []
    assert core.input_queue.qsize() == 2


def test_requests_keep_their_place_when_a_call_is_taken_out(core: Core):
    core.send(1, method="one")
    core.send(2)
    core.send(3, method="other")
    core.begin()

    assert core.handled == [2]
    core.handle_waiting()
    assert core.handled == [2, 1, 3]


def test_no_call_overtakes_another(core: Core):
    core.begin()
    core.calls._enqueue((core.kinds.UTILITY, [0, 1, "kv_exchange", ()]))  # it arrived just before the step
    core.send(2)

    assert core.handled == []
    core.end()
    core.handle_waiting()
    assert core.handled == [1, 2]


def test_an_engine_without_such_a_thread_has_calls_between_steps_only(core: Core):
    calls = type(core.calls)()
    calls.attach_to(SimpleNamespace())
    calls.begin()


def test_each_call_is_carried_out_once_whenever_it_comes(core: Core):
    sender = threading.Thread(target=lambda: [core.send(number) for number in range(CALLS)])
    sender.start()
    while sender.is_alive() or not core.input_queue.empty():
        core.handle_waiting()
        with core.calls.lock:
            core.scheduling = True
            core.calls.end()
            core.scheduling = False
            core.calls.begin()
        core.end()
    sender.join(SOON_S)

    assert core.handled == list(range(CALLS))
