"""`baton up --workers-max`: a model's fleet grows while long prompts come, and shrinks when they stay away; another
model's fleet stays as it is.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.e2e.conftest import START_S_MAX
from tests.support.second_model import second_model
from tests.support.system import System, baton, until

pytestmark = pytest.mark.nats

CLIENTS = 4
GROWN_S_MAX, SHRUNK_S_MAX = 120.0, 120.0
FAST = {"ORCHESTRATOR_PLANNER_TIME_SCALE": "0.05"}
"""A planner for which three seconds are a minute."""
SLOW_PREFILL = {"WORKER_SIMULATED": "prefill_tokens_per_s=1500"}


@contextmanager
def long_prompts(system: System) -> Iterator[list[int]]:
    """Clients that each send one prompt after another, none of them twice; the HTTP statuses of their answers."""
    statuses: list[int] = []
    stop = threading.Event()

    def ask(client: int) -> None:
        number = 0
        while not stop.is_set():
            number += 1
            prompt = f"client {client} asks for the {number}. time, " + " ".join(
                str(client * 7919 + number * 104729 + word) for word in range(150)
            )
            body = {"model": "baton-tiny", "prompt": prompt, "max_tokens": 4, "ignore_eos": True}
            statuses.append(system.http.post("/v1/completions", json=body).status_code)

    threads = [threading.Thread(target=ask, args=(client,), daemon=True) for client in range(CLIENTS)]
    for thread in threads:
        thread.start()
    try:
        yield statuses
    finally:
        stop.set()
        for thread in threads:
            thread.join(START_S_MAX)


def plans(system: System) -> list[dict]:
    """``baton plan --json``."""
    code, out, err = baton("plan", "--json", "--state-dir", str(system.folder))
    assert code == 0, err
    return json.loads(out)["decisions"]


def count(system: System, role: str) -> int:
    return int(system.fleet_metrics().sum("baton_fleet_workers", role=role, phase="ready"))


def test_prefill_workers_come_with_long_prompts_and_leave_after_them(tmp_path: Path):
    scaled = ("--model", "baton-tiny", "--prefill", "1", "--decode", "1", "--workers-max", "3")
    other = ("--model", second_model(tmp_path), "--both", "1")
    with System(tmp_path, "--engine", "simulated", *scaled, *other, env={**FAST, **SLOW_PREFILL}) as system:
        system.wait_ready(START_S_MAX)

        with long_prompts(system) as statuses:
            until(lambda: count(system, "prefill") == 2, "a second prefill worker is ready", GROWN_S_MAX)
        until(lambda: count(system, "prefill") == 1, "it has left again", SHRUNK_S_MAX)

        assert set(statuses) == {200}
        assert {each["model"] for each in plans(system)} == {"baton-tiny", other[1]}
        assert count(system, "both") == 1
        done = [(each["action"], each["role"], each["change"]) for each in plans(system) if each["action"] == "scale"]
        assert done == [("scale", "prefill", -1), ("scale", "prefill", 1)]
        assert "prefill-2 is ready" in system.said()
        until(lambda: not system.pids("services.worker", "prefill-2"), "no process is left of it")
