"""When a process counts as one that stands still. Time is virtual, the socket is real."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from services.launcher.system.process_plan import Stage
from services.launcher.system.watchdog import STEP_S, STILL_S_MAX, Silences, Watchdog
from shared.runtime.heartbeat import BEAT, PAUSE, Heartbeat, heartbeat_of
from tests.support.virtual_time import in_virtual_time

ME, OTHER, LIMIT_S = 17, 18, 10.0
HOUR_S = 3600.0


def steps(silences: Silences, seconds: float) -> list[int]:
    """Everybody who stood still in this time."""
    return [pid for _ in range(round(seconds / STEP_S)) for pid in silences.step()]


def watching() -> Silences:
    silences = Silences()
    silences.watch(ME, LIMIT_S)
    silences.watch(OTHER, LIMIT_S)
    return silences


def test_a_process_that_falls_silent_is_found_once_and_the_others_are_not():
    silences = watching()
    silences.heard(ME, BEAT)

    for _ in range(10):
        silences.heard(OTHER, BEAT)
        assert steps(silences, LIMIT_S / 10) == []
    silences.heard(OTHER, BEAT)

    assert steps(silences, STEP_S) == [ME]
    assert steps(silences, LIMIT_S - STEP_S) == []


@pytest.mark.parametrize(
    "said", [[], [BEAT, PAUSE], [b"WATCHDOG_USEC=10000000", BEAT, PAUSE], [b"\xff\x00", b"READY=1"]]
)
def test_a_process_is_not_watched_before_its_first_beat_nor_in_a_pause(said):
    silences = watching()
    for message in said:
        silences.heard(ME, message)

    assert steps(silences, HOUR_S) == []
    silences.heard(ME, BEAT)
    assert steps(silences, 2 * LIMIT_S) == [ME]


def test_processes_of_others_and_those_that_have_ended_count_for_nothing():
    silences = watching()
    silences.heard(99, BEAT)
    silences.heard(ME, BEAT)
    silences.forget(ME)
    silences.heard(ME, BEAT)

    assert steps(silences, HOUR_S) == []


@asynccontextmanager
async def watched(stage: Stage = Stage.SERVICES) -> AsyncIterator[tuple[Heartbeat, dict[str, float]]]:
    """This process, as a child of a launcher in the same loop; and when it was found still."""
    found: dict[str, float] = {}
    now = asyncio.get_running_loop().time

    async def watch() -> None:
        while True:
            await asyncio.sleep(STEP_S)
            found.update((why, now()) for why in watchdog.step().values())

    with Watchdog() as watchdog:
        watchdog.watch(os.getpid(), stage)
        watching = asyncio.create_task(watch())
        yield heartbeat_of(watchdog.variables(stage)), found
        watching.cancel()


@in_virtual_time
async def test_a_loop_that_runs_is_let_live_and_one_that_stands_still_is_found_in_time():
    async with watched() as (heartbeat, found):
        await asyncio.sleep(HOUR_S)
        heartbeat.begin()
        await asyncio.sleep(HOUR_S)
        assert found == {}
        heartbeat.pause()
        await asyncio.sleep(HOUR_S)
        heartbeat.begin()
        assert found == {}

        before = asyncio.get_running_loop().time()
        heartbeat._timer.cancel()
        await asyncio.sleep(HOUR_S)

    [(why, at)] = found.items()
    assert 0 < at - before - STILL_S_MAX[Stage.SERVICES] <= 2 * STEP_S
    assert "Its event loop stood still for 10 s" in why


@in_virtual_time
async def test_a_launcher_that_was_suspended_with_its_processes_ends_none():
    loop = asyncio.get_running_loop()
    async with watched() as (heartbeat, found):
        heartbeat.begin()
        for _ in range(5):
            await asyncio.sleep(LIMIT_S)
            loop._jumping.now += HOUR_S
        await asyncio.sleep(LIMIT_S)

    assert found == {}


def test_variables_ask_for_heartbeats_of_one_process_and_its_children_do_not_inherit_them():
    asked = {"NOTIFY_SOCKET": "@x", "WATCHDOG_USEC": "10000000", "WATCHDOG_PID": str(os.getpid())}
    other = {**asked, "WATCHDOG_PID": "1"}

    assert heartbeat_of(asked)._address == "\0x"
    assert heartbeat_of(other)._address == ""
    assert heartbeat_of({"NOTIFY_SOCKET": "/run/systemd/notify"})._address == ""
    assert asked == other == {}


async def test_nats_is_asked_for_no_heartbeats():
    with Watchdog() as watchdog:
        assert watchdog.variables(Stage.NATS) == {}
