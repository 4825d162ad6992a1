"""The table of an attempt: every leg's end is expected, and every attempt ends."""

import os
from pathlib import Path

import pytest

from services.router.relay.attempt import STARTS, TRANSITIONS, Action, Event, State, diagram

DRAWING = Path(__file__).parents[4] / "docs" / "attempt.mmd"
PREFILL, ANSWER = {Event.PREFILLED, Event.PREFILL_FAILED}, {Event.ANSWERED, Event.ANSWER_FAILED}
RUNNING = {
    State.PREFILL: PREFILL,
    State.BOTH: PREFILL | ANSWER,
    State.ANSWERING: ANSWER,
    State.PREFILL_LEFT: PREFILL,
    State.OVER: set(),
}
"""The ends of the legs that run in each state."""


def test_the_drawing_in_docs_is_drawn_from_the_table():
    if os.environ.get("REWRITE"):
        DRAWING.write_text(diagram())

    assert DRAWING.read_text() == diagram(), "draw it anew: REWRITE=1 pytest tests/unit/router/relay/test_attempt.py"


@pytest.mark.parametrize("state", State)
def test_each_state_expects_the_ends_of_its_legs_and_no_others(state: State):
    assert {event for at, event in TRANSITIONS if at is state} == RUNNING[state]


@pytest.mark.parametrize("start", STARTS)
def test_an_attempt_ends_once_however_its_legs_end(start: State):
    paths = [(start, list[Action]())]
    while paths:
        state, actions = paths.pop()
        if state is State.OVER:
            ends = [action for action in actions if action in (Action.END, Action.END_AS_ANSWER)]
            assert ends == actions[-1:]
        for event in RUNNING[state]:
            after, action = TRANSITIONS[state, event]
            assert len(actions) < len(State)
            paths.append((after, [*actions, action]))
