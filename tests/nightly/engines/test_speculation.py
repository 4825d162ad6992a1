"""Handoffs between real engines with speculative decoding: the draft's KV travels with the model's.

The model drafts for itself, so that every drafted token is accepted where the draft has the KV of the prompt. Greedy tokens are
the model's whatever was drafted, so only the share of accepted drafts tells whether the draft's KV has arrived.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

import pytest

from services.worker.tiny_model import ensure_tiny_model
from shared.contracts.inference import LegKind
from shared.contracts.kv_exchange import KvTransferReport
from tests.engines.forged_reads import ENGINE_ARGS, FORGERY_FILE, Forgery, spoil, spoiled
from tests.support.kv_driver import BLOCK, Driver, driving, transfer_report_of
from tests.support.kv_tap import Tap
from tests.support.nats_server import NatsServer
from tests.support.prompts import random_prompt
from tests.support.worker_processes import Answer, ready_workers, start_worker

pytestmark = [pytest.mark.vllm, pytest.mark.nats]

PREFILL, DECODE = "p1", "d1"
ANSWER = 64
AT_LEAST = 0.98
"""Acceptance after a handoff, as a share of that without one."""


def speculation(**config: object) -> str:
    return f"--speculative-config {shlex.quote(json.dumps({'num_speculative_tokens': 3, **config}))}"


METHODS = {
    "draft": {"method": "draft_model"},
    "ngram": {"method": "ngram", "prompt_lookup_max": 2, "prompt_lookup_min": 1},
}


@pytest.fixture(scope="module", params=METHODS)
def method(request: pytest.FixtureRequest) -> str:
    chosen: str = request.param
    return chosen


@pytest.fixture(scope="module")
def forgery(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file that says how the decode engine's reads are spoiled."""
    file = tmp_path_factory.mktemp("forgery") / "forgery"
    spoil(file)
    return file


@pytest.fixture(scope="module")
def nats(method: str, forgery: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    folder: Path = tmp_path_factory.mktemp("drafts")
    drafter = {"model": str(ensure_tiny_model(folder))} if method == "draft" else {}
    drafting = speculation(**METHODS[method], **drafter)
    decode = {"engine_args": f"{drafting} {ENGINE_ARGS}", "environ": {FORGERY_FILE: str(forgery)}}
    # A drafter that looks for earlier text has no KV: the prefill engine does without.
    prefill = {"engine_args": drafting if method == "draft" else ""}
    with NatsServer(folder, has_buckets=True) as nats:
        model = {"max_model_len": "2000"}
        with ready_workers(
            nats.url,
            start_worker(nats.url, PREFILL, folder, role="prefill", cpu_cores="0", **model, **prefill),
            start_worker(nats.url, DECODE, folder, role="decode", cpu_cores="1", **model, **decode),
        ):
            yield nats


@pytest.fixture
async def driver(nats: NatsServer) -> AsyncIterator[Driver]:
    async with Tap(nats.url) as tap, driving(tap) as driver:
        await tap.until(lambda: {PREFILL, DECODE} <= tap.loads.keys(), "both workers say how busy they are")
        yield driver


def acceptance(report: KvTransferReport) -> float:
    assert report.drafted_tokens > 0
    return report.accepted_tokens / report.drafted_tokens


async def alone(driver: Driver, prompt: Sequence[int]) -> Answer:
    """Of the decode engine that computes the prompt itself."""
    return await driver.leg(DECODE, LegKind.AGGREGATED, prompt, fields={"max_tokens": ANSWER, "cache_salt": "alone"})


async def handed_over(driver: Driver, prompt: Sequence[int]) -> Answer:
    offer = await driver.offered(PREFILL, prompt)
    answer = await driver.taken(DECODE, prompt, offer, fields={"max_tokens": ANSWER})
    assert transfer_report_of(answer).fetched_tokens == len(prompt) // BLOCK * BLOCK
    return answer


@pytest.mark.parametrize("tokens", [300, 333, 1300])
async def test_as_many_drafts_are_accepted_after_a_handoff_as_without(driver: Driver, method: str, tokens: int):
    """Of a text drafter none are accepted, since the answers of a model with random weights repeat nothing."""
    prompt = random_prompt(f"{method}-{tokens}", tokens)

    by_itself, after = await alone(driver, prompt), await handed_over(driver, prompt)

    assert after.token_ids == by_itself.token_ids
    reports = transfer_report_of(by_itself), transfer_report_of(after)
    if method == "draft":
        assert acceptance(reports[1]) >= AT_LEAST * acceptance(reports[0]) > AT_LEAST * AT_LEAST
    elif tokens > 1000:  # The text before has some of the answer's tokens.
        assert min(report.drafted_tokens for report in reports) > 0


async def test_without_the_drafts_kv_hardly_any_draft_is_accepted(driver: Driver, method: str, forgery: Path):
    """The control: tokens are equal, so that they cannot tell."""
    if method == "ngram":
        pytest.skip("it has no KV")
    prompt = random_prompt("withheld", 333)
    by_itself = await alone(driver, prompt)

    with spoiled(forgery, Forgery.DRAFTLESS, group=0, groups=1):
        after = await handed_over(driver, prompt)

    assert after.token_ids == by_itself.token_ids
    assert acceptance(transfer_report_of(after)) < 0.5
