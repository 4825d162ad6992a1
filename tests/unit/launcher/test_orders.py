"""``baton drain`` and ``baton role``: arguments and reports."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from services.launcher.cli import app
from shared.contracts.fleet_orders import RoleChanged, WorkerDrained
from shared.contracts.ids import Epoch, WorkerId
from shared.contracts.workers import Role
from shared.text.fleet_text import drained, draining, role_changed
from shared.text.formats import in_bytes

NOTHING_RAN = "d2 drained in 3.2 s: no request was running"


def left(**numbers) -> WorkerDrained:
    return WorkerDrained(worker_id=WorkerId("d2"), epoch=Epoch(1), seconds=3.25, **numbers)


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (left(), f"{NOTHING_RAN}."),
        (left(legs=1), "d2 drained in 3.2 s: 1 of 1 running requests finished."),
        (
            left(legs=5, legs_cut=2),
            "d2 drained in 3.2 s: 3 of 5 running requests finished, 2 continued on other workers.",
        ),
        (
            left(prefixes=2, prefixes_left=1, blocks=40, bytes=5 << 20, evacuation_s=0.5),
            f"{NOTHING_RAN}; 2 hot prefixes moved (40 blocks, 5.0 MiB, 0.5 s); 1 not moved, no worker could take them.",
        ),
    ],
)
def test_a_drain_is_reported(result: WorkerDrained, text: str):
    assert drained(result) == text


def test_a_draining_worker_shows_its_running_requests():
    assert draining("d2", None, evacuate=True) == "d2 is draining, moving its hot prefixes to other workers"
    assert draining("d2", 2, evacuate=False) == "d2 is draining: 2 requests still running"
    assert draining("d2", 0, evacuate=False) == "d2 is draining: no request running"


def test_a_role_change_is_reported_with_its_duration():
    result = RoleChanged(
        worker_id=WorkerId("p1"), epoch=Epoch(1), before=Role.PREFILL, role=Role.DECODE, seconds=0.123, legs=3
    )

    assert role_changed(result) == (
        "p1 changed its role from prefill to decode: verified and registered in 0.12 s; 3 running requests continued."
    )


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (200 << 20, "200 MiB"), (3 << 40, "3.0 TiB")]
)
def test_bytes_have_a_fitting_unit(count: int, text: str):
    assert in_bytes(count) == text


@pytest.mark.parametrize("command", [["drain", "p 1.>"], ["role", "p.1", "decode"]])
def test_an_invalid_worker_id_is_rejected_before_anything_is_sent(command: list[str]):
    done = CliRunner().invoke(app, command)

    assert done.exit_code == 1
    assert "is not a worker id" in done.output


def test_a_worker_with_an_engine_cannot_be_made_a_store():
    assert CliRunner().invoke(app, ["role", "p1", "store"]).exit_code == 2
