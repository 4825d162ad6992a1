"""Handoffs between real engines with speculative decoding: the draft's KV travels with the model's.

The drafter computes what the model does, so that nearly every drafted token is accepted where it has the KV of the prompt.
Greedy tokens are the model's whatever was drafted, so only the share of accepted drafts tells whether the draft's KV has arrived.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

import pytest

from shared.contracts.channels import WORKER_RECORDS
from shared.contracts.ids import WorkerId
from shared.contracts.inference import LegKind
from shared.contracts.kv_exchange import KvTransferReport
from shared.contracts.load import StepTotals
from shared.contracts.workers import HashScheme
from shared.engine_speed.steps import Steps
from tests.engines.forged_reads import ENGINE_ARGS, FORGERY_FILE, Forgery, spoil, spoiled
from tests.support.drafters import ACCEPTED_MIN, AT_LEAST, DRAFTED, METHODS, Drafting
from tests.support.kv_driver import BLOCK, MODEL, Driver, driving, transfer_report_of
from tests.support.kv_tap import Tap
from tests.support.nats_server import NatsServer
from tests.support.prompts import random_prompt
from tests.support.worker_processes import Answer, ready_workers, start_worker

pytestmark = [pytest.mark.vllm, pytest.mark.nats]

PREFILL, DECODE, PLAIN = "p1", "d1", "plain"
ANSWER = 64


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
    drafting = Drafting.by(method, folder)
    decode = {"engine_args": f"{drafting.engine_args} {ENGINE_ARGS}", "environ": {FORGERY_FILE: str(forgery)}}
    # A drafter that looks for earlier text has no KV: the prefill engine does without.
    prefill = {"engine_args": drafting.engine_args if method != "ngram" else ""}
    with NatsServer(folder, has_buckets=True) as nats:
        model = {"model": str(drafting.model), "served_model_name": MODEL, "max_model_len": "2000"}
        with ready_workers(
            nats.url,
            start_worker(nats.url, PREFILL, folder, role="prefill", cpu_cores="0", **model, **prefill),
            start_worker(nats.url, DECODE, folder, role="decode", cpu_cores="1", **model, **decode),
            start_worker(nats.url, PLAIN, folder, role="both", cpu_cores="0", **model),
        ):
            yield nats


@pytest.fixture
async def driver(nats: NatsServer) -> AsyncIterator[Driver]:
    async with Tap(nats.url) as tap, driving(tap) as driver:
        await tap.until(lambda: {PREFILL, DECODE, PLAIN} <= tap.loads.keys(), "all workers say how busy they are")
        yield driver


def acceptance(report: KvTransferReport) -> float:
    assert report.drafted_tokens > 0
    return report.accepted_tokens / report.drafted_tokens


async def hashing_of(driver: Driver, worker: str) -> HashScheme:
    """From the worker's record."""
    found = await (await driver.bus.key_value_store(WORKER_RECORDS)).get(WorkerId(worker))
    assert found is not None
    assert found.value is not None
    return found.value.hashing


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
    if method != "ngram":
        # The first token comes with the KV, so drafts begin elsewhere: one may be refused by chance.
        by_chance = 1 / reports[1].drafted_tokens
        assert acceptance(reports[1]) + by_chance >= AT_LEAST * acceptance(reports[0])
        assert acceptance(reports[0]) >= ACCEPTED_MIN[method]
    elif tokens > 1000:  # The text before has some of the answer's tokens.
        assert min(report.drafted_tokens for report in reports) > 0


@pytest.mark.parametrize("tokens", [300, 320])
async def test_a_hit_and_a_read_are_what_the_workers_record_says(driver: Driver, method: str, tokens: int):
    """After EAGLE or MTP, routers predict a block less of a hit, and have a read begin before that block: the engine
    reads what follows its own hit, so a source that began after the block would bring nothing.
    """
    hashing, held = await hashing_of(driver, DECODE), 5 * BLOCK
    prompt, one = random_prompt(f"found {tokens}", tokens), {"max_tokens": 1}
    assert hashing.dropped == (BLOCK if method in {"eagle", "mtp"} else 0)
    for _time in range(2):
        computed = await driver.leg(PREFILL, LegKind.AGGREGATED, prompt, fields=one)
    assert computed.report.cached_tokens == hashing.usable(tokens) or method == "ngram"
    await driver.leg(DECODE, LegKind.AGGREGATED, prompt[: held + 1], fields=one)

    own = hashing.usable(held + 1)
    source = driver.source(PREFILL, first=own // BLOCK)
    read = await driver.leg(
        DECODE, LegKind.AGGREGATED, prompt, kv_sources=[source], kv_fetch_min_tokens=1, fields={"max_tokens": ANSWER}
    )
    found = await driver.leg(DECODE, LegKind.AGGREGATED, prompt, fields=one)

    report = transfer_report_of(read)
    assert (report.local_tokens, report.fetched_tokens) == (own, hashing.handed_over(tokens) - own)
    assert found.report.cached_tokens == hashing.usable(tokens)
    assert read.token_ids == (await alone(driver, prompt)).token_ids


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


async def test_an_engine_reports_its_steps_and_not_the_tokens_of_accepted_drafts(driver: Driver, method: str):
    """Its speed is learned from what it reports: steps that make several tokens must not look faster."""
    before = await steps_of_decode(driver)
    report = transfer_report_of(await alone(driver, random_prompt(f"steps {method}", 333)))
    made = Steps.between(before, await steps_of_decode(driver))

    later_tokens = ANSWER - 1 - report.accepted_tokens  # The last step may accept more than the answer has room for.
    assert later_tokens <= made.decode_requests <= later_tokens + DRAFTED
    assert made.decode_steps == made.decode_requests


async def steps_of_decode(driver: Driver) -> StepTotals:
    """The decode engine's totals; it computes nothing."""
    await driver.tap.until_settled(DECODE)
    steps = driver.tap.loads[DECODE].steps
    assert steps is not None
    return steps


async def test_usage_and_log_probabilities_are_those_without_drafts(driver: Driver, method: str):
    prompt, fields = random_prompt(f"scored {method}", 1300), {"max_tokens": ANSWER, "logprobs": 2}
    own = {**fields, "cache_salt": "scored"}
    offer = await driver.offered(PREFILL, prompt, fields=fields)
    plain = await driver.leg(PLAIN, LegKind.AGGREGATED, prompt, fields=own)
    drafted = [
        await driver.leg(DECODE, LegKind.AGGREGATED, prompt, fields=own),
        await driver.taken(DECODE, prompt, offer, fields=fields),
    ]

    expected = [(token, at, pytest.approx(likeliest, abs=1e-3)) for token, at, likeliest in scores_of(plain)]
    assert len(expected) == ANSWER
    for answer in drafted:
        assert transfer_report_of(answer).drafted_tokens > 0
        assert scores_of(answer) == expected
        for counted in ("prompt_tokens", "completion_tokens", "total_tokens"):
            assert answer.json()["usage"][counted] == plain.json()["usage"][counted]


def scores_of(answer: Answer) -> list[tuple[str, int, dict[str, float]]]:
    """Each token, its offset in the text, and the log probabilities of the likeliest ones there."""
    scores = answer.json()["choices"][0]["logprobs"]
    return list(zip(scores["tokens"], scores["text_offset"], scores["top_logprobs"], strict=True))
