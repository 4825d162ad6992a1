"""`baton top` as a picture: it fits any terminal, and shows the present state."""

from __future__ import annotations

import io

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from services.launcher.views.top import State, frame
from services.launcher.views.watch import Watch
from services.launcher.views.workers import Drawing, bar, rates
from shared.contracts.workers import Role, WorkerPhase
from tests.support.examples import examples
from tests.unit.launcher.busy_system import NOW, a_busy_system, join, request

SIZES = [(80, 24), (80, 40), (110, 36), (160, 45), (240, 70)]
SMALLEST = (20, 6)


def drawn(
    watch: Watch, columns: int, lines: int, *, first: int = 0, letters: bool = False, **state: object
) -> list[str]:
    out = io.StringIO()
    console = Console(file=out, width=columns, height=lines, no_color=True)
    present = State(now=NOW, clock="14:03:22", first_worker=first, **state)  # type: ignore[arg-type]
    console.print(frame(watch, present, Drawing(columns, lines, letters)), highlight=False)
    return out.getvalue().rstrip("\n").split("\n")


@pytest.mark.parametrize(("columns", "lines"), [*SIZES, SMALLEST])
@pytest.mark.parametrize("letters", [False, True])
def test_a_frame_fills_the_terminal_and_never_exceeds_it(columns: int, lines: int, letters: bool):
    shown = drawn(a_busy_system(), columns, lines, letters=letters)

    assert len(shown) == lines
    assert max(map(len, shown)) <= columns
    assert shown[-1].startswith("q quit")
    if letters:
        assert all(line.isascii() for line in shown)


@pytest.mark.parametrize(("columns", "lines"), SIZES)
def test_every_worker_has_its_line(columns: int, lines: int):
    text = drawn(a_busy_system(), columns, lines)
    of = {line.split()[1]: line for line in text if line.startswith("●")}

    assert list(of) == ["prefill-1", "prefill-2", "decode-1", "decode-2", "decode-10", "both-1", "store-1"]
    assert "draining" in of["prefill-2"]
    assert of["decode-2"].split()[2:4] == ["decode", "lost"]
    assert "21.3k" in of["prefill-1"]
    assert "1234" in of["decode-1"]


@pytest.mark.parametrize(("columns", "lines"), [(80, 40), (160, 45)])
def test_a_frame_has_traffic_flows_requests_plans_and_events(columns: int, lines: int):
    text = "\n".join(drawn(a_busy_system(), columns, lines))

    for part in (
        "1/2 prefill  1/2 decode  1 both  1 store",
        "1 router  leader orchestrator-1  14:03:22",
        "96% disaggregated",
        "1 failed in the last 60 s: 1 overloaded",
        "planner prefill 2 at 21%   decode 3, wants 4 at 93%",
        "prefill-1 → decode-1 ━━━━━━━━━━━━     17    811 MiB KV",
        "503 overloaded",
        "2,051 tok, 24% cached  TTFT 151 ms",
        "decode-2 lost: no report for 3.0 s",
        "decode-7 drained in 3.2 s, 12 requests, 44 prefixes moved",
        "planner both-1 becomes decode",
        "decode-10: KV self-test with prefill-1",
    ):
        assert part in text


def test_more_workers_than_lines_can_be_scrolled_and_are_counted():
    fleet = {f"decode-{number}": (Role.DECODE, WorkerPhase.READY) for number in range(1, 201)}
    watch = a_busy_system(fleet)

    shown = [
        [line.split()[1] for line in drawn(watch, 80, 30, first=first) if line.startswith("●")] for first in (0, 7)
    ]
    last = [line.split()[1] for line in drawn(watch, 80, 30, first=199) if line.startswith("●")]

    assert shown[0][0] == "decode-1"
    assert shown[1] == [f"decode-{number}" for number in range(8, 8 + len(shown[0]))]
    assert last[-1] == "decode-200"
    assert any("of 200 workers" in line for line in drawn(watch, 80, 30))


def test_different_revisions_are_shown():
    watch = Watch(NOW - 60)
    join(watch, "w1", Role.BOTH, WorkerPhase.READY, NOW, revision="0a1b2c3d4e5f6a7b")
    join(watch, "w2", Role.BOTH, WorkerPhase.READY, NOW, revision="v2")

    text = "\n".join(drawn(watch, 80, 24))
    assert "0a1b2c3d4e5f" in text
    assert "v2" in text


def test_an_empty_system_and_a_lost_connection_are_shown():
    watch = Watch(NOW - 60)

    assert "no workers" in drawn(watch, 80, 24)[0]
    assert "no leader" in drawn(watch, 80, 24)[0]
    assert "NATS does not respond" in drawn(watch, 80, 24, connected=False)[0]
    assert "listening" in drawn(Watch(NOW - 1), 80, 24)[0]


def test_control_characters_of_clients_are_escaped():
    watch = a_busy_system()
    watch.finished([request(99, status=500, reason="\x1b[2Jgone\r\n")], NOW)
    join(watch, "w9", Role.BOTH, WorkerPhase.PROBING, NOW)

    assert all(line.isprintable() for line in drawn(watch, 160, 45))


@pytest.mark.parametrize(
    ("per_s", "text"),
    [(0.0, "0"), (0.5, "0.5"), (12.4, "12"), (9999.0, "9999"), (12_345.0, "12.3k"), (123_456.0, "123k")],
)
def test_rates_are_short(per_s: float, text: str):
    assert rates(per_s) == text


@given(st.floats(-1, 2), st.integers(1, 40))
def test_bars_have_the_given_width(share: float, columns: int):
    assert len(bar(share, columns).plain) == columns
    assert set(bar(1.0, columns).plain) == {"━"}
    assert set(bar(0.0, columns).plain) == {"─"}


@settings(max_examples=examples(40))
@given(st.integers(20, 250), st.integers(6, 80), st.integers(0, 12))
def test_frames_fit_any_terminal_size(columns: int, lines: int, first: int):
    shown = drawn(BUSY, columns, lines, first=first)

    assert len(shown) == lines
    assert max(map(len, shown)) <= columns


BUSY = a_busy_system()
