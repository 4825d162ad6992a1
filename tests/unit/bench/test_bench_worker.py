"""The worker's benchmark: only whole answers count, and both servers get the same engine arguments."""

from __future__ import annotations

import pytest

from bench.bench_router import OTHER_CORE, ROUTER_CORE
from bench.bench_worker import BATON, Load, Taken, note, rows_of
from bench.peer_checks import RunFailed
from bench.plain_vllm import plain_arguments
from bench.worker_load import Answer, check, make_bodies
from services.worker.settings import Settings

STREAM = [b'data: {"choices":[{"text":"a"}]}\n\n', b'data: {"usage":{"completion_tokens":2}}\n\n', b"data: [DONE]\n\n"]


def answer(**changes) -> Answer:
    return Answer(**{"begun_at": 1.0, "first_at": 1.5, "ended_at": 2.0, "pieces": STREAM, "token_ids": 2, **changes})


def test_whole_answers_count():
    check([answer(), answer(token_ids=-1)], 2, tokens=2, stream=True)


@pytest.mark.parametrize(
    "changes",
    [{"failure": "status 500"}, {"ended_at": 0.0}, {"token_ids": 1}, {"pieces": STREAM[:2]}, {"pieces": STREAM[2:]}],
    ids=["failed", "no-end", "token-ids", "cut-off", "no-usage"],
)
def test_one_incomplete_answer_fails_the_run(changes):
    with pytest.raises(RunFailed):
        check([answer(), answer(**changes)], 2, tokens=2, stream=True)


def test_an_unsent_request_fails_the_run():
    with pytest.raises(RunFailed):
        check([answer()], 2, tokens=2, stream=True)


def test_each_figure_comes_from_the_run_that_left_its_core_alone():
    load = Load(tokens=2, stream=True, at_once=1, requests=1)
    measured = {}
    note(Taken(load, 0.001, 0.002, [answer()]), BATON, ROUTER_CORE, 14.0, measured)
    note(Taken(load, 0.003, 0.004, [answer(first_at=1.9)]), BATON, OTHER_CORE, 15.0, measured)
    figures = {row.label: measured[load.label, row.label][BATON].values for row in rows_of(load)}

    assert figures == {
        "CPU of the server": [pytest.approx(500.0)],
        "CPU of EngineCore": [pytest.approx(2000.0)],
        "time to first token": [pytest.approx(900.0)],
        "time per output token": [pytest.approx(100.0)],
        "events per token": [pytest.approx(0.5)],
    }


def test_prompts_are_distinct_from_their_beginning():
    bodies = make_bodies(20, tokens=2, stream=False, seed="s")

    assert len({body[:140] for body in bodies}) == 20


def test_the_plain_server_gets_the_workers_arguments_without_batons():
    words = plain_arguments(Settings(), "/model")

    assert words[words.index("--block-size") + 1] == "32"
    assert not any("kv" in word and word != "--kv-cache-memory-bytes" for word in words if word.startswith("--"))
    assert "--enable-logging-iteration-details" not in words
