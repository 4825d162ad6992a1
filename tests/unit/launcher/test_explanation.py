"""The explanation of a decision agrees with its numbers."""

from __future__ import annotations

import io
from typing import Any

import msgspec
import pytest
from rich.console import Console

from services.launcher.views.explain import Query, draw, query_of
from shared.contracts.decisions import CandidateRecord, DecisionRecord, Part, TtftParts
from shared.contracts.ids import Epoch, WorkerId
from shared.contracts.kv_exchange import KvSource
from shared.text import explanation
from shared.text.formats import duration


def one(
    worker_id: str, part: Part, *, chosen: bool = False, meets_targets: bool = True, **numbers: Any
) -> CandidateRecord:
    cost_s = sum(value for name, value in numbers.items() if name.endswith("_s"))
    return CandidateRecord(
        worker_id=WorkerId(worker_id), part=part, chosen=chosen, meets_targets=meets_targets, cost_s=cost_s, **numbers
    )


P2 = one("p2", Part.PREFILL, chosen=True, cached_tokens=7936, computed_tokens=256, prefill_s=0.21)
P1 = one("p1", Part.PREFILL, computed_tokens=8192, prefill_s=1.43)
D1 = one("d1", Part.DECODE, chosen=True, handoff_s=0.02, decode_s=1.0)
D2 = one("d2", Part.DECODE, handoff_s=0.02, decode_s=2.0)
PREDICTED = TtftParts(prefill_s=0.21, handoff_s=0.02, decode_prefill_s=0.01)
MEASURED = TtftParts(
    tokenize_s=0.001, queue_s=0.05, prefill_s=0.2, handoff_s=0.02, decode_prefill_s=0.01, front_end_and_bus_s=0.004
)


def decision(**fields: Any) -> DecisionRecord:
    defaults: dict[str, Any] = {
        "decision_id": "router-1-ab-d00000000000000000000000000000007",
        "router_id": "router-1-ab",
        "request_id": "r-1",
        "at_unix_s": 0.0,
        "model": "m",
        "mode": "disaggregated",
        "reason": "prefill and decode apart cost least",
        "prompt_tokens": 8192,
        "counted_prompt_tokens": 8192,
        "exact": True,
        "considered": 4,
        "candidates": [P2, P1, D1, D2],
        "prefill_worker": "p2",
        "decode_worker": "d1",
        "predicted": PREDICTED,
        "measured": MEASURED,
        "ttft_s": MEASURED.total_s(),
        "predicted_cached_tokens": 7936,
        "cached_tokens": 7936,
        "regret_s": 0.0,
        "outcome": "ok",
    }
    return DecisionRecord(**{**defaults, **fields})


def test_the_headline_names_the_workers_and_the_outcome():
    assert explanation.headline(decision()) == "Request r-1 ran: prefill on p2, decode on d1."
    running = decision(outcome="", measured=None, ttft_s=-1.0)
    assert explanation.headline(running) == "Request r-1 is running: prefill on p2, decode on d1."
    alone = decision(mode="aggregated", prefill_worker="", outcome="worker_lost")
    assert explanation.headline(alone) == "Request r-1 failed (worker_lost): prefill and decode on d1."
    refused = decision(mode="", reason="All are full.", outcome="worker_busy")
    assert explanation.headline(refused) == "Request r-1 was not placed (worker_busy): All are full."


def test_the_reason_is_the_largest_difference_in_cost():
    cached, faster = explanation.because(decision())

    assert cached.startswith("p2 was chosen because it has 7,936 of 8,192 prompt tokens cached: ")
    assert cached.endswith(": predicted cost 210 ms, next best 1.43 s on p1.")
    assert faster.startswith("d1 was chosen because its decode is faster (1.00 s instead of 2.00 s): ")
    assert faster.endswith(": predicted cost 1.02 s, next best 2.02 s on d2.")


@pytest.mark.parametrize(
    ("other", "why", "because"),
    [
        ({"queue_s": 3.0, "prefill_s": 0.2}, "longer queue", "its queue is shorter"),
        ({"prefill_s": 9.0, "cached_tokens": 7936}, "slower prefill", "its prefill is faster"),
        ({"prefill_s": 0.2, "fetch_s": 2.0, "cached_tokens": 7936}, "more to fetch", "it has less KV to fetch"),
        ({"prefill_s": 0.2, "others_s": 2.0}, "delays others", "it delays other requests less"),
        ({"prefill_s": 0.2101}, "equal cost", "p1 costs the same"),
        ({"prefill_s": 0.1}, "not allowed", "although p1 costs less"),
        ({"prefill_s": 0.1, "meets_targets": False}, "misses target", "would miss a target"),
    ],
)
def test_why_a_worker_was_not_chosen(other: dict[str, Any], why: str, because: str):
    candidate = one("p1", Part.PREFILL, **other)
    record = decision(candidates=[P2, candidate])

    assert explanation.why_not(candidate, P2) == why
    assert because in explanation.because(record)[0]


def test_the_only_worker_needs_no_comparison():
    (sentence,) = explanation.because(decision(candidates=[P2]))

    assert sentence == "p2 was chosen because no other worker could run the prefill."
    assert explanation.because(decision(mode="", candidates=[])) == []


def test_decode_time_within_the_target_costs_nothing():
    within = msgspec.structs.replace(D2, within_s=1.75, cost_s=D2.cost_s - 1.75)
    slow = msgspec.structs.replace(D1, chosen=False)
    record = decision(candidates=[msgspec.structs.replace(within, chosen=True), slow])

    assert explanation.because(record)[0].startswith(
        "d2 was chosen because its decode is faster (250 ms instead of 1.00 s)"
    )
    assert "within the ITL target" in picture(record, 80)


def test_cached_kv_beats_fetchable_kv():
    fetching = one("p1", Part.PREFILL, fetched_tokens=7936, fetch_s=0.5, prefill_s=0.21)

    assert "because it has 7,936 of 8,192" in explanation.because(decision(candidates=[P2, fetching]))[0]
    assert explanation.why_not(fetching, P2) == "more to fetch"


def test_regret_names_the_part_with_the_largest_delay():
    late = decision(measured=TtftParts(queue_s=2.0, prefill_s=0.2), ttft_s=2.2, regret_s=0.75)

    assert explanation.regret_text(late).startswith("Regret 750 ms: ")
    assert explanation.regret_text(late).endswith("largest delay: queue, 2.00 s more than predicted.")
    assert explanation.regret_text(decision()).startswith("No regret")
    assert explanation.regret_text(decision(candidates=[P2, D1])) == "No regret: there was no other candidate."
    assert explanation.regret_text(decision(measured=None)) == ""


def test_targets_are_met_missed_or_not_measured():
    assert explanation.target_text(decision(ttft_target_s=0.2, itl_target_s=0.02, itl_s=0.01)) == [
        "TTFT target 200 ms: missed (285 ms)",
        "ITL target 20 ms: met (10 ms)",
    ]
    assert explanation.target_text(decision(ttft_target_s=0.2, ttft_s=-1.0)) == ["TTFT target 200 ms: not measured"]
    assert explanation.target_text(decision()) == []


def test_targets_have_the_probability_with_which_the_prediction_meets_them():
    record = decision(
        ttft_target_s=5.0, ttft_probability=0.999, itl_target_s=0.1, predicted_itl_s=0.097, itl_probability=0.612
    )

    assert explanation.target_text(record) == [
        "TTFT target 5.00 s: met (285 ms); 240 ms predicted from its placement on, which meets it with over 99 %",
        "ITL target 100 ms: not measured; 97 ms predicted, which meets it with 61 %",
    ]
    assert "which meets it with 61 %" in picture(record, 160)
    unlikely = explanation.target_text(decision(ttft_target_s=5.0, ttft_probability=0.0))
    assert unlikely[0].endswith("with under 1 %")


def test_cached_tokens_are_shown_as_far_as_known():
    assert explanation.cached_text(decision()) == "8,192 tokens, 7,936 cached, as predicted"
    assert explanation.cached_text(decision(cached_tokens=7904)).endswith(
        "7,936 predicted to be cached, 7,904 were cached"
    )
    running = explanation.cached_text(decision(counted_prompt_tokens=-1, cached_tokens=-1))
    assert running == "about 8,192 tokens, 7,936 predicted to be cached"
    late = decision(predicted_cached_tokens=-1, why_inexact="its media were not rendered within 1 s")
    assert "could not be predicted, because its media were not rendered within 1 s; " in explanation.cached_text(late)
    assert "could not be predicted; 32 were cached" in explanation.cached_text(
        decision(predicted_cached_tokens=-1, cached_tokens=32)
    )


def test_the_length_of_a_prompt_is_the_engines_count_beside_the_estimate():
    new = decision(prompt_tokens=540, counted_prompt_tokens=409, predicted_cached_tokens=0, cached_tokens=0)
    assert explanation.cached_text(new) == "409 tokens (about 540 estimated), 0 cached, as predicted"


def test_durations_use_a_readable_unit():
    seconds = (0, 0.00004, 0.0004, 0.0099, 0.012, 0.9994, 1.0, 9.99, 12.34, 432.1)

    assert [duration(each) for each in seconds] == [
        "0 ms", "0 ms", "0.4 ms", "9.9 ms", "12 ms", "999 ms", "1.00 s", "9.99 s", "12.3 s", "432 s",
    ]  # fmt: skip


def test_an_id_names_a_decision_or_a_request():
    assert query_of("latest", "") == Query("latest")
    assert query_of("router-1-ab-d00000000000000000000000000000007", "") == Query(
        "router-1-ab-d00000000000000000000000000000007"
    )
    assert query_of("my-request", "") == Query(request_id="my-request")
    assert query_of("latest", "r-d7") == Query(request_id="r-d7")


def picture(decision: DecisionRecord, columns: int, encoding: str = "utf-8", **console: Any) -> str:
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding=encoding, newline="")
    draw(decision, Console(file=file, width=columns, **console))
    file.flush()
    return raw.getvalue().decode(encoding)


EVERYTHING = decision(
    candidates=[
        msgspec.structs.replace(each, worker_id=WorkerId(f"{each.worker_id}-on-a-machine-with-a-long-name"))
        for each in (P2, P1, D1, D2)
    ],
    considered=1000,
    attempt=2,
    earlier="router-1-ab-d00000000000000000000000000000006",
    tenant="acme",
    priority=-3,
    ttft_target_s=0.2,
    itl_target_s=0.02,
    itl_s=0.01,
    predicted_itl_s=0.01,
    sources=[KvSource(worker_id=WorkerId("d9"), epoch=Epoch(1), first=3, end=9)],
    measured=TtftParts(**dict.fromkeys(TtftParts.__struct_fields__, 0.125)),
    recompute_slowed_s=0.25,
    ttft_s=1.375,
    regret_s=0.5,
)
SHAPES = {
    "everything": EVERYTHING,
    "default": decision(),
    "running": decision(outcome="", measured=None, ttft_s=-1.0, regret_s=-1.0),
    "refused": decision(mode="", candidates=[], predicted=TtftParts(), measured=None, outcome="no_worker"),
    "nothing known": decision(candidates=[], predicted=TtftParts(), measured=None, ttft_s=0.3),
    "no time at all": decision(predicted=TtftParts(), measured=TtftParts(), ttft_s=0.0),
    "hostile": decision(model="\x1b[31m\nm", reason="\x1b]0;x\x07", tenant="[bold]\u202e", request_id="[red]"),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
@pytest.mark.parametrize("columns", [80, 120])
def test_the_picture_fits_and_has_no_control_characters(shape: str, encoding: str, columns: int):
    drawn = picture(SHAPES[shape], columns, encoding)

    assert all(len(line) <= columns for line in drawn.splitlines())
    assert "\x1b" not in drawn


def test_the_picture_says_for_how_long_a_recompute_was_slowed():
    assert "slowed for 250 ms beside ready requests" in picture(EVERYTHING, 120)
    assert "slowed" not in picture(decision(recompute_slowed_s=0.0), 120)


def test_the_picture_says_how_many_drafts_were_accepted():
    drafts = picture(decision(drafted_tokens=126, accepted_tokens=42), 120)

    assert "42 of 126 drafted tokens accepted (33%)" in drafts
    assert "drafted" not in picture(decision(), 120)


def test_the_picture_shows_predicted_and_measured_parts_on_one_scale():
    lines = picture(decision(), 80).splitlines()
    (prefill,) = [line for line in lines if line.strip().startswith("prefill ")]
    (queue,) = [line for line in lines if line.strip().startswith("queue ")]

    assert prefill.split()[1:5] == ["210", "ms", "200", "ms"]
    assert queue.split()[1:4] == ["-", "50", "ms"]
    assert 0 < queue.count("▄") < prefill.count("█") + prefill.count("▄")
    assert prefill.index("▀") < prefill.rindex("▄")  # What was predicted begins and ends earlier.


def test_the_picture_marks_the_chosen_and_explains_the_others():
    lines = picture(decision(), 120).splitlines()

    assert any("●" in line and "p2" in line and "chosen" in line for line in lines)
    assert any("●" not in line and "p1" in line and "less cached" in line for line in lines)


def test_a_terminal_gets_colour_and_the_same_text():
    coloured = picture(decision(), 80, force_terminal=True, color_system="standard", legacy_windows=False)

    assert "\x1b[" in coloured
    assert "was chosen because" in coloured


def test_the_gap_that_a_request_waited_for_is_explained():
    text = explanation.gap_text(decision(gap_worker="w1", gap_step_s=0.112))

    assert text.startswith("waited for w1 to leave one between prompts: its steps with prompt tokens take 112 ms")
    assert text[:60] in picture(decision(gap_worker="w1", gap_step_s=0.112), 120)
    assert explanation.gap_text(decision()) == ""


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, ""),
        ({"cache_hit_threshold": 0.8}, "80% must be cached or fetched (set by nobody)"),
        (
            {"cache_hit_threshold": 0.8, "threshold_from": "worker_default", "hit_share": 0.412},
            "80% must be cached or fetched (the worker's default); 41.2% was: refused",
        ),
        (
            {"cache_hit_threshold": 0.33, "threshold_from": "request", "hit_share": 0.4},
            "33% must be cached or fetched (set by the request); 40.0% was: served",
        ),
    ],
)
def test_a_threshold_is_explained_with_its_origin_and_what_was_found(fields, text):
    one, out = decision(**fields), io.StringIO()

    draw(one, Console(file=out, width=200))

    assert explanation.threshold_text(one) == text
    assert ("threshold" in out.getvalue()) == bool(text)
    assert text in out.getvalue()
