"""Which models sleep and wake: by their idle time, by requests, by operators, and within the operator's bounds."""

from __future__ import annotations

import pytest

from services.orchestrator.settings import Settings
from services.orchestrator.sleeping import AWAKE_S_MIN, REPEAT_S, WANT_S, Sleeper, SleepPolicy
from shared.contracts.workers import FleetWorker, Role, WorkerPhase
from tests.support.fleet_builders import record

READY, ASLEEP, STARTING, DRAINING = (WorkerPhase.READY, WorkerPhase.ASLEEP, WorkerPhase.STARTING, WorkerPhase.DRAINING)
AFTER_S = 100.0


class World:
    """Workers ``a1``, ``a2`` of model a and so on. They follow orders in ``follow``, at the next tick."""

    def __init__(self, phases: dict[str, WorkerPhase], **policy: object) -> None:
        self.sleeper = Sleeper(SleepPolicy(**policy))
        self.phases = dict(phases)
        self.busy: set[str] = set()
        self.now = 0.0
        self.given: list[tuple[str, bool]] = []
        self.tick()

    def tick(self, seconds: float = 0.0) -> list[tuple[str, bool]]:
        """The orders of this instant: worker and whether it is to sleep."""
        self.now += seconds
        workers = [self._worker(name, phase) for name, phase in self.phases.items()]
        self.sleeper.update(workers, self.now)
        given = [(order.worker_id, order.asleep) for order in self.sleeper.orders(self.now)]
        self.given += given
        return given

    def follow(self, given: list[tuple[str, bool]]) -> None:
        for name, asleep in given:
            self.phases[name] = ASLEEP if asleep else READY

    def _worker(self, name: str, phase: WorkerPhase) -> FleetWorker:
        role = Role.STORE if name.endswith("s") else Role.BOTH
        one = record(name, phase, role=role, models=(name[0], f"alias-{name[0]}"))
        return FleetWorker(record=one, phase=phase, since_s=0.0, silent_s=0.0, running=int(name in self.busy))


def test_a_model_sleeps_after_its_idle_time_and_its_store_does_not():
    world = World({"a1": READY, "a2": READY, "as": READY, "b1": READY}, after_s={"a": AFTER_S})

    assert world.tick(AFTER_S - 1.0) == []
    assert world.tick(1.0) == [("a1", True), ("a2", True)]


@pytest.mark.parametrize("use", ["request", "running"])
def test_a_model_in_use_stays_awake(use: str):
    world = World({"a1": READY}, after_s={"a": AFTER_S})
    world.tick(AFTER_S - 1.0)
    if use == "request":
        world.sleeper.used("a1", world.now)
    else:
        world.busy.add("a1")
        world.tick()
        world.busy.clear()

    assert world.tick(AFTER_S - 1.0) == []
    assert world.tick(1.0) == [("a1", True)]


def test_a_request_wakes_all_workers_of_its_model():
    world = World({"a1": ASLEEP, "a2": ASLEEP, "b1": ASLEEP})

    answer = world.sleeper.want("a", world.now)

    assert answer.asleep
    assert answer.refusal == ""
    assert answer.expected_s > 0.0
    assert world.tick() == [("a1", False), ("a2", False)]


def test_the_expected_time_is_that_of_the_last_waking_and_shrinks():
    world = World({"a1": ASLEEP})
    world.sleeper.want("a", world.now)
    world.tick()
    world.phases["a1"] = STARTING
    world.tick(7.0)
    world.phases["a1"] = READY
    world.tick(5.0)
    world.phases["a1"] = ASLEEP
    world.tick()

    assert world.sleeper.want("a", world.now).expected_s == 12.0
    world.tick()
    world.phases["a1"] = STARTING
    world.tick(4.0)
    assert world.sleeper.want("a", world.now).expected_s == 8.0


def test_orders_that_are_not_followed_are_repeated_while_they_hold():
    world = World({"a1": ASLEEP})
    world.sleeper.want("a", world.now)

    assert world.tick() == [("a1", False)]
    assert world.tick(REPEAT_S / 2) == []
    assert world.tick(REPEAT_S / 2) == [("a1", False)]
    assert world.tick(WANT_S) == []  # Nobody waits any more.


def test_a_model_that_starts_or_serves_is_not_asleep():
    world = World({"a1": STARTING, "b1": READY})

    assert not world.sleeper.want("a", world.now).asleep
    assert not world.sleeper.want("b", world.now).asleep
    assert not world.sleeper.want("unknown", world.now).asleep


def test_a_request_that_comes_while_its_model_falls_asleep_wakes_it_again():
    world = World({"a1": READY}, after_s={"a": AFTER_S})
    assert world.tick(AFTER_S) == [("a1", True)]
    world.phases["a1"] = DRAINING
    world.tick(1.0)

    assert world.sleeper.want("a", world.now).asleep
    del world.phases["a1"]  # Between its two processes.
    world.tick(1.0)
    assert world.sleeper.want("a", world.now).asleep
    world.phases["a1"] = ASLEEP
    assert world.tick(1.0) == [("a1", False)]


def test_the_longest_unused_model_makes_room_and_is_asleep_before_the_other_wakes():
    world = World({"a1": READY, "b1": READY, "c1": ASLEEP}, awake_max=2)
    world.tick(AWAKE_S_MIN)
    world.sleeper.used("a1", world.now)
    world.tick(AWAKE_S_MIN)

    assert world.sleeper.want("c", world.now).refusal == ""
    assert world.tick() == [("b1", True)]
    world.phases["b1"] = DRAINING
    assert world.tick(1.0) == []
    world.phases["b1"] = ASLEEP
    assert world.tick(1.0) == [("c1", False)]


def test_models_that_join_beyond_the_bound_send_the_longest_unused_to_sleep():
    world = World({"a1": READY}, awake_max=1)
    world.tick(AWAKE_S_MIN)
    world.phases["b1"] = READY

    assert world.tick() == [("a1", True)]
    world.follow([("a1", True)])
    assert world.tick(AWAKE_S_MIN) == []


def test_models_in_use_make_no_room_and_the_refusal_says_when_one_may():
    world = World({"a1": READY, "b1": ASLEEP}, awake_max=1)
    world.tick(AWAKE_S_MIN)
    world.sleeper.used("a1", world.now)
    world.tick(10.0)

    answer = world.sleeper.want("b", world.now)

    assert "another model is awake and in use" in answer.refusal
    assert answer.retry_after_s == AWAKE_S_MIN - 10.0
    assert world.tick() == []
    world.tick(AWAKE_S_MIN - 10.0)
    assert world.sleeper.want("b", world.now).refusal == ""
    assert world.tick() == [("a1", True)]


def test_two_models_that_are_wanted_in_turn_do_not_change_at_once():
    world = World({"a1": READY, "b1": ASLEEP}, awake_max=1)
    for _ in range(300):
        for model in "ab":
            world.sleeper.want(model, world.now)
            if world.phases[f"{model}1"] is READY:
                world.sleeper.used(f"{model}1", world.now)
        world.follow(world.tick(1.0))

    assert world.given == []  # Model a is in use all the time.


def test_only_operators_wake_models_where_requests_may_not():
    world = World({"a1": ASLEEP}, on_request=False)

    assert "baton wake" in world.sleeper.want("a", world.now).refusal
    assert world.tick() == []
    assert world.sleeper.order("a", world.now, asleep=False).workers == ["a1"]
    assert world.tick() == [("a1", False)]


def test_operators_put_a_model_to_sleep_by_any_of_its_names():
    world = World({"a1": READY, "a2": STARTING})

    assert world.sleeper.order("alias-a", world.now, asleep=True).workers == ["a1"]
    assert world.tick() == [("a1", True)]
    world.phases |= {"a1": ASLEEP, "a2": READY}
    assert world.tick(1.0) == [("a2", True)]
    assert "no worker serves x; models: a" in world.sleeper.order("x", world.now, asleep=True).refusal


def test_an_operators_order_to_wake_respects_the_bound():
    world = World({"a1": READY, "b1": ASLEEP}, awake_max=1)

    assert "another model is awake" in world.sleeper.order("b", world.now, asleep=False).refusal


@pytest.mark.parametrize("text", ['{"a": 0}', '{"a": -1}', '{"": 5}', "5", "nonsense", '{"a": "x"}'])
def test_bad_idle_times_are_refused(text: str):
    with pytest.raises(ValueError, match="ORCHESTRATOR_SLEEP_AFTER_S"):
        SleepPolicy.from_settings(Settings(sleep_after_s=text))
