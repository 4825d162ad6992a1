"""Published traces become requests."""

from __future__ import annotations

import pytest

from replay.traces import Request, TraceError, at_load, chains, read_trace
from tests.support.replay_worlds import conversations, write_mooncake

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,1374,44\n2023-11-16 18:15:50.9951690,396,109\n"


def test_a_mooncake_trace_keeps_lengths_and_the_contents_of_full_blocks(tmp_path):
    given = conversations(30)
    read = read_trace(write_mooncake(tmp_path / "trace.jsonl", given))

    assert sorted((r.blocks, r.input_tokens, r.output_tokens) for r in read) == sorted(
        (r.blocks, r.input_tokens, r.output_tokens) for r in given
    )


def test_requests_of_one_window_are_spread_in_order_by_seed(tmp_path):
    path = write_mooncake(tmp_path / "trace.jsonl", conversations(60))
    times = [request.at_s for request in read_trace(path, seed=3)]

    assert times == sorted(times)
    assert times[0] == 0.0
    assert len(set(times)) > 50
    assert times == [request.at_s for request in read_trace(path, seed=3)]
    assert times != [request.at_s for request in read_trace(path, seed=4)]


def test_prompts_of_an_azure_trace_share_nothing(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text(AZURE)
    first, second = read_trace(path)

    assert (first.at_s, first.input_tokens, first.output_tokens) == (0.0, 1374, 44)
    assert second.at_s == pytest.approx(4.314579)
    assert len(first.blocks) == 2
    assert not set(first.blocks) & set(second.blocks)


@pytest.mark.parametrize("text", ["", "{}\n", "no json\n", '{"timestamp": 1}\n'])
def test_a_file_that_is_no_trace_is_refused_with_its_name(tmp_path, text):
    path = tmp_path / "trace.jsonl"
    path.write_text(text)

    with pytest.raises(TraceError, match=r"trace\.jsonl"):
        read_trace(path)


def test_a_trace_can_be_sped_up():
    requests = [Request(float(second), (), 1, 1) for second in range(0, 1800, 600)]

    assert [request.at_s for request in at_load(requests, 2.0)] == [0.0, 300.0, 600.0]


def test_a_name_stands_for_a_block_and_all_before_it():
    one, two, other = chains(
        [Request(0.0, (1, 2, 3), 1600, 1), Request(0.0, (1, 2, 4), 1600, 1), Request(0.0, (5, 2, 3), 1600, 1)]
    )

    assert one[:2] == two[:2]
    assert one[2] != two[2]
    assert not set(one) & set(other)
