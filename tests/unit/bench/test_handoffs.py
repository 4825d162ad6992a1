"""A run counts for handoffs only if the KV of each of its requests moved; its prompts are new, and as long as they say."""

from __future__ import annotations

from argparse import Namespace
from itertools import islice
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from bench.handoffs import check_moved
from bench.load_client import make_parser, make_requests, turns
from bench.message_counts import KINDS, OTHERS, kind_of
from bench.peer_checks import RunFailed
from bench.prose import Prose
from services.worker.tiny_model import ensure_tiny_tokenizer
from shared.contracts.channels import CHANNELS
from shared.contracts.inference import KvMoved, RequestFinished

BLOCK = 32


def finished(*moves: KvMoved, mode: str = "disaggregated") -> RequestFinished:
    return RequestFinished(
        request_id="r", model="m", path="/", mode=mode, status=200, prefill_worker="p", decode_worker="d", kv_moves=[*moves]
    )  # fmt: skip


MOVE = KvMoved(source_id="p", reader_id="d", tokens=64, bytes=1000)


def test_each_request_moved_kv():
    found = check_moved([finished(MOVE), finished(MOVE, MOVE)], 2)

    assert (found.requests, found.handoffs, found.bytes) == (2, 2, 3000)


@pytest.mark.parametrize(
    "other",
    [
        finished(),
        finished(MOVE, mode="aggregated"),
        finished(KvMoved(source_id="d", reader_id="p", tokens=64, bytes=1000)),
        finished(KvMoved(source_id="p", reader_id="d", tokens=0, bytes=0)),
    ],
    ids=["none", "aggregated", "read-back", "no-bytes"],
)
def test_one_request_that_moved_nothing_fails_the_run(other: RequestFinished):
    with pytest.raises(RunFailed, match="1 of 3 requests moved no KV"):
        check_moved([finished(MOVE), other, finished(MOVE)], 3)


@pytest.mark.parametrize("requests", [0, 1, 3])
def test_requests_that_were_not_reported_fail_the_run(requests: int):
    with pytest.raises(RunFailed, match="2 requests"):
        check_moved([finished(MOVE)] * 2, requests)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = ensure_tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


@pytest.mark.parametrize(("tokens", "within"), [(100, 0.25), (500, 0.1), (2000, 0.05), (8000, 0.03), (30_000, 0.03)])
def test_prose_has_as_many_tokens_as_it_should(tokenizer: Tokenizer, tokens: int, within: float):
    text = Prose("seed").text(tokens)

    assert len(tokenizer.encode(text).ids) == pytest.approx(tokens, rel=within)


def options(*more: str) -> Namespace:
    return make_parser().parse_args(["--port=0", *more])


def prompts(*more: str) -> list[bytes]:
    return [request.partition(b'"prompt":')[2] for request in islice(make_requests(options(*more)), 300)]


def test_no_prompt_has_a_block_of_another_one(tokenizer: Tokenizer):
    found = [one.decode() for seed in ("1", "2") for one in prompts(f"--seed={seed}")]
    blocks = {tuple(tokenizer.encode(one).ids[:BLOCK]) for one in found}

    assert len(blocks) == len(found) == 600


def test_a_number_of_prompts_is_used_in_turn():
    found = prompts("--prompts=8")

    assert len(set(found)) == 8
    assert found[:8] == found[8:16]


def test_a_turn_continues_the_one_before_it():
    first, second, third = turns(options("--prompt-tokens=500", "--turns-to=3"), 0)

    assert len(first) < len(second) < len(third)
    prompt = first.partition(b'"prompt":')[2].partition(b'", "max_tokens"')[0]
    assert prompt in second


def test_messages_are_counted_by_what_they_are():
    for name, channel in KINDS.items():
        assert kind_of(CHANNELS[channel].subject.replace("{", "").replace("}", "")) == name
    assert kind_of("_INBOX.abc") == OTHERS
