"""The KV exchange between real vLLM engines over NIXL: every way in which KV moves gives the tokens of an engine that
computed everything itself, and the transfer_report says that nothing but the tail was computed twice.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import psutil
import pytest

from shared.contracts.inference import LegKind
from shared.contracts.kv_exchange import NoGrant, blocks_in
from shared.contracts.load import LoadReport
from shared.contracts.workers import WorkerPhase
from tests.engines.system.fleet import AGAIN_S, DECODE, PREFILL, STORE, THRESHOLD, Client, Fleet, HttpReply, client_of
from tests.support.kv_driver import BLOCK, transfer_report_of
from tests.support.processes import quietest_cpu
from tests.support.prompts import prompts_with_shared_prefixes, random_prompt

pytestmark = [pytest.mark.vllm, pytest.mark.nats]

ENGINES = (PREFILL, DECODE)
KV_BYTES_PER_TOKEN = 2048
"""2 layers, keys and values, 2 heads of 64 floats."""
CACHED_SOON_S = 2.0
"""Until the router's index knows what an engine has cached, and idle engines have said that they are idle."""
ATTEMPTS = 3
"""On a busy machine a grant may come too late, and the reader computes the prompt itself."""
TURNS: dict[str, Callable[[list[int]], tuple[list[int], int]]] = {
    "next": lambda history: ([*history, *random_prompt("next", 100)], whole_blocks(len(history) - 1)),
    "edited": lambda history: (
        [*history[: 26 * BLOCK + 7], 77, *history[26 * BLOCK + 8 :], *random_prompt("edited", 40)],
        26 * BLOCK,
    ),
    "shortened": lambda history: (history[: 32 * BLOCK + 3] + random_prompt("shortened", 300), 32 * BLOCK),
}
"""A prompt from the history so far, and how many of its first tokens an engine has cached."""
ON_DECODE: dict[str, Any] = {"mode": "aggregated", "baton": {"decode_worker": DECODE}}
ABORTS, ABORTING_AT_ONCE, PATIENCE_S_MAX = 100, 8, 1.0
IDLE_CPU_MAX = 0.1
CONNECTED_S_MAX = 60.0
STORE_BACK_S_MAX = 120.0
GRANTS_BETWEEN_STEPS_MAX = 8
"""In two or three steps, if each grant waited for the end of one."""


def test_nothing_of_a_system_on_loopback_listens_elsewhere(fleet: Fleet):
    """UCX's and Gloo's ports too. Nobody sets anything for it."""
    found = fleet.system.addresses()

    assert set(found) == {"127.0.0.1"}, found
    assert any("EngineCore" in command for command in found["127.0.0.1"]), found
    records = {name: worker["record"] for name, worker in fleet.system.fleet().items()}
    assert {name: record["listens"] for name, record in records.items()} == {PREFILL: [], DECODE: [], STORE: []}


@pytest.fixture
async def client(fleet: Fleet) -> AsyncIterator[Client]:
    async with client_of(fleet) as client:
        yield client


def whole_blocks(tokens: int) -> int:
    """How many of so many tokens lie in full blocks."""
    return tokens // BLOCK * BLOCK


async def test_streamed_and_offered_handoffs_give_the_tokens_of_one_engine(client: Client):
    prompts = prompts_with_shared_prefixes(20, shortest=100, count=6)
    alone = [await client.alone(prompt) for prompt in prompts]
    assert len({tuple(tokens) for tokens in alone}) == len(prompts)

    for handoff in ("streamed", "offered"):
        for prompt, expected in zip(prompts, alone, strict=True):
            said = await client.ask(prompt, "disaggregated", endpoint=handoff, cache_salt=handoff)
            legs = await client.tap.legs_of(said.request_id)
            prefill, decode = legs[LegKind.PREFILL].transfer_report, legs[LegKind.DECODE].transfer_report

            assert said.token_ids == expected, (handoff, len(prompt), decode)
            for transfer_report in (prefill, decode):
                parts = (
                    transfer_report.local_tokens + transfer_report.fetched_tokens + transfer_report.recomputed_tokens
                )
                assert parts == transfer_report.prompt_tokens == len(prompt)
            assert decode.recomputed_tokens <= BLOCK, (handoff, len(prompt), decode)
            assert all(read.followed == (handoff == "streamed") for read in decode.reads if read.tokens)
            assert sum(read.bytes for read in decode.reads) == decode.fetched_tokens * KV_BYTES_PER_TOKEN
            assert said.json["usage"]["prompt_tokens_details"] is None or (
                said.json["usage"]["prompt_tokens_details"]["cached_tokens"] == prefill.local_tokens
            )
    await client.tap.until_settled(*ENGINES)


async def test_streamed_answers_are_the_same_tokens(client: Client):
    prompt = random_prompt("streamed", 1500)

    events = await client.events(prompt, "disaggregated")

    tokens = [token for event in events for choice in event["choices"] for token in choice["token_ids"] or []]
    assert tokens == await client.alone(prompt)


@pytest.mark.parametrize("turn", ["next", "edited", "shortened"])
async def test_a_turn_fetches_the_history_that_it_shares_with_the_decode_engine(client: Client, turn: str):
    for attempt in range(ATTEMPTS):
        first = random_prompt(f"first of {turn} {attempt}", 20 * BLOCK)
        said = await client.ask(first, "disaggregated", max_tokens=15 * BLOCK, baton={"decode_worker": DECODE})
        await asyncio.sleep(CACHED_SOON_S)
        prompt, shared = TURNS[turn](first + said.token_ids)

        # Whether to fetch so little is placement's to decide, by how busy it finds the workers: here it is told to.
        answer = await client.ask(prompt, "disaggregated", baton={"sources": [DECODE]})
        prefill = (await client.tap.legs_of(answer.request_id))[LegKind.PREFILL].transfer_report

        assert answer.token_ids == await client.alone(prompt)
        if all(read.failure != NoGrant.UNREACHABLE for read in prefill.reads):
            break
    assert prefill.local_tokens + prefill.fetched_tokens == shared, prefill
    assert prefill.fetched_tokens >= shared - len(first), prefill
    assert prefill.recomputed_tokens == len(prompt) - shared
    assert [read.tokens for read in prefill.reads if read.tokens] == [prefill.fetched_tokens]


async def test_one_prompt_is_read_from_two_holders(client: Client):
    driver, prompt = client.driver, random_prompt("two holders", 40 * BLOCK + 5)
    alone = await client.alone(prompt)
    await driver.leg(DECODE, LegKind.AGGREGATED, random_prompt("known to all", BLOCK))
    await until_read(client, STORE, DECODE, random_prompt("known to all", BLOCK))
    await until_read(client, PREFILL, STORE, random_prompt("known to all", BLOCK))
    await driver.leg(DECODE, LegKind.AGGREGATED, prompt)
    assert (await driver.fetch(STORE, prompt[: 15 * BLOCK], driver.source(DECODE))).fetched == 15
    sources = [driver.source(STORE, end=15), driver.source(DECODE, first=15)]

    answer = await driver.leg(PREFILL, LegKind.AGGREGATED, prompt, kv_sources=sources)

    transfer_report = transfer_report_of(answer)
    assert answer.token_ids == alone
    assert [(read.worker_id, read.tokens) for read in transfer_report.reads] == [
        (STORE, 15 * BLOCK),
        (DECODE, 25 * BLOCK),
    ]
    assert transfer_report.recomputed_tokens == 5


async def test_what_was_prefetched_is_cached_and_no_token_was_computed(client: Client):
    prompt = random_prompt("prefetched", 30 * BLOCK + 1)
    await client.driver.leg(PREFILL, LegKind.AGGREGATED, prompt)
    before = client.tap.loads[DECODE]

    fetched = await client.driver.fetch(DECODE, prompt, client.driver.source(PREFILL))
    again = await client.driver.fetch(DECODE, prompt, client.driver.source(PREFILL))
    await asyncio.sleep(CACHED_SOON_S)

    after = client.tap.loads[DECODE]
    assert (fetched.held, fetched.fetched, fetched.failure) == (0, 30, "")
    assert fetched.bytes == 30 * BLOCK * KV_BYTES_PER_TOKEN
    assert (again.held, again.fetched) == (30, 0)
    assert after.computed_tokens_total == before.computed_tokens_total
    assert after.generation_tokens_total == before.generation_tokens_total
    answer = await client.driver.leg(DECODE, LegKind.AGGREGATED, prompt)
    assert transfer_report_of(answer).local_tokens == 30 * BLOCK
    assert answer.token_ids == await client.alone(prompt)
    await client.tap.until_settled(*ENGINES)


async def test_a_request_below_its_cache_hit_threshold_is_refused_uncomputed(client: Client):
    """The requests of vLLM PR #24520, with a threshold of 0.8 for all workers; the last one has no field."""
    base = random_prompt("threshold", 1000)

    async def served(shared: int, **fields: float) -> bool:
        prompt = base[:shared] + random_prompt(f"after {shared}", 1000 - shared)
        await client.tap.until_settled(DECODE)  # Its report counts the request before, too.
        before = client.tap.loads[DECODE].computed_tokens_total
        said = await client.ask(prompt, **ON_DECODE, **fields)
        assert said.status == 200, said
        if said.choice["finish_reason"] == "cache_threshold":
            assert said.choice["text"] == ""
            assert not said.choice["token_ids"]
            assert said.json["usage"]["completion_tokens"] == 0
            await asyncio.sleep(CACHED_SOON_S)
            assert client.tap.loads[DECODE].computed_tokens_total == before
            return False
        assert len(said.token_ids) == 16
        assert said.token_ids == await client.alone(prompt)
        return True

    assert await served(0, cache_hit_threshold=0.0)
    warm = await client.ask(base, **ON_DECODE, cache_hit_threshold=0.0)
    assert len(warm.token_ids) == 16
    assert not await served(280, cache_hit_threshold=0.33)
    assert await served(400, cache_hit_threshold=0.33)
    prompt = base[:410] + random_prompt("after 410", 590)
    refused = await client.driver.leg(DECODE, LegKind.AGGREGATED, prompt, cache_hit_threshold=None)
    assert (refused.report.finish_reason, refused.token_ids) == ("cache_threshold", [])
    assert refused.report.kv.hit_share == whole_blocks(410) / 1000

    mended = await client.ask(prompt, **ON_DECODE)

    assert mended.token_ids == await client.alone(prompt), "the router answers the client, not the worker's default"
    first, second = await decisions(client, mended)
    assert (first["outcome"], first["threshold_from"]) == ("cache_missed", "worker_default")
    assert (first["cache_hit_threshold"], first["hit_share"]) == (THRESHOLD, whole_blocks(410) / 1000)
    assert (second["outcome"], second["mode"], second["cache_hit_threshold"]) == ("ok", "aggregated", -1.0)


async def decisions(client: Client, said: HttpReply, endpoint: str = "streamed") -> list[dict[str, Any]]:
    """The decisions about the request's attempts, the first one first."""
    url = f"{client.fleet.endpoints[endpoint]}/baton/decisions"
    reply = await client.http.get(url, params={"request_id": said.request_id})
    return reply.json()["decisions"][::-1]


@pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK + 9])
async def test_the_workers_threshold_refuses_no_short_prompt(client: Client, length: int):
    """Of a prompt below a block nothing can be cached or fetched; of a short one too little is handed over."""
    prompt = random_prompt(f"short {length}", length)

    for handoff in ("streamed", "offered"):
        said = await client.ask(prompt, "disaggregated", endpoint=handoff, cache_salt=handoff)

        assert said.token_ids == await client.alone(prompt)
        (decision,) = await decisions(client, said, handoff)
        assert (decision["mode"], decision["outcome"]) == ("aggregated" if length < BLOCK else "disaggregated", "ok")


async def test_decode_first_is_served_by_the_worker_that_has_most_and_else_computed_by_a_prefill_worker(client: Client):
    first = random_prompt("decode first", 20 * BLOCK)
    said = await client.ask(first, "disaggregated", max_tokens=5 * BLOCK)
    await asyncio.sleep(CACHED_SOON_S)
    turn = [*first, *said.token_ids, *random_prompt("decode first, next", 40)]
    alone = await client.alone(turn)

    async def ask(endpoint: str, **fields: Any) -> list[dict[str, Any]]:
        """The decisions about a turn that is new to all but the decode worker's cache of the history."""
        reply = await client.ask(turn, "decode_first", endpoint=endpoint, **fields)
        assert reply.token_ids == alone
        return await decisions(client, reply, endpoint)

    at_share_of_1 = await ask("offered")
    refused, after = await ask("streamed", cache_hit_threshold=1.0)
    (served,) = await ask("streamed")

    assert [one["mode"] for one in at_share_of_1] == ["disaggregated"]
    assert (refused["mode"], refused["outcome"]) == ("decode_first", "cache_missed")
    assert (refused["threshold_from"], refused["cache_hit_threshold"]) == ("request", 1.0)
    assert 0.8 < refused["hit_share"] < 1.0
    assert (after["mode"], after["prefill_worker"], after["decode_worker"]) == ("disaggregated", PREFILL, DECODE)
    assert (served["mode"], served["decode_worker"], served["threshold_from"]) == (
        "decode_first",
        DECODE,
        "decode_first",
    )
    assert served["hit_share"] > 0.8


async def test_the_thresholds_ends_streams_and_empty_prompts(client: Client):
    cold = random_prompt("cold", 300)

    events = await client.events(cold, cache_hit_threshold=1.0)
    empty = await client.ask("", cache_hit_threshold=0.5)
    none = await client.ask([], cache_hit_threshold=0.5)
    wrong = [await client.ask(cold, cache_hit_threshold=value) for value in (-0.1, 1.1, "x")]

    assert [choice["finish_reason"] for choice in events[-1]["choices"]] == ["cache_threshold"]
    assert not any(choice["text"] for event in events for choice in event["choices"])
    assert (empty.status, none.status) == (400, 400), "vLLM's own answer"
    assert [said.status for said in wrong] == [400] * 3
    assert all("cache_hit_threshold" in said.json["error"]["message"] for said in wrong)


async def test_a_prefill_leg_is_exempt_and_what_can_be_fetched_counts(client: Client):
    cold = random_prompt("cold, handed over", 700)

    for handoff in ("streamed", "offered"):
        said = await client.ask(cold, "disaggregated", endpoint=handoff, cache_salt=handoff, cache_hit_threshold=0.9)

        assert said.token_ids == await client.alone(cold)


async def test_a_hundred_requests_with_random_aborts_leave_nothing_pinned(client: Client):
    dice, abort_slots = random.Random(7), asyncio.Semaphore(ABORTING_AT_ONCE)
    ended = {"answered": 0, "left": 0}
    begun_at = time.monotonic()
    await client.ask(random_prompt("before aborts", 500), "disaggregated", max_tokens=12)
    patience_s_max = max(PATIENCE_S_MAX, ABORTING_AT_ONCE * (time.monotonic() - begun_at))  # more on a busy machine

    async def ask_and_maybe_leave(number: int) -> None:
        async with abort_slots:
            asking = client.ask(
                random_prompt(f"aborted {number}", dice.randint(40, 900)),
                "disaggregated",
                endpoint=dice.choice(("streamed", "offered")),
                max_tokens=dice.randint(1, 24),
            )
            try:
                said = await asyncio.wait_for(asking, dice.uniform(0.01, patience_s_max))
                assert said.status == 200, said
                ended["answered"] += 1
            except (TimeoutError, httpx.HTTPError):
                ended["left"] += 1

    await asyncio.gather(*(ask_and_maybe_leave(number) for number in range(ABORTS)))
    begun_at = time.monotonic()
    await client.tap.until_settled(*ENGINES)

    print(f"\n{ended}, nothing pinned {time.monotonic() - begun_at:.1f} s after the last")
    assert min(ended.values()) > 0
    prompt = random_prompt("after aborts", 500)
    assert (await client.ask(prompt, "disaggregated")).token_ids == await client.alone(prompt)


async def test_a_holder_grants_while_it_computes_a_step(client: Client):
    driver, held = client.driver, random_prompt("granted", 300)
    await driver.leg(PREFILL, LegKind.AGGREGATED, held)
    granted = 0

    computing = asyncio.create_task(
        driver.leg(PREFILL, LegKind.AGGREGATED, random_prompt("long", 4000), fields={"max_tokens": 1})
    )
    while not computing.done():
        grant = await driver.lease(PREFILL, held, hold_s=5.0)
        assert blocks_in(grant.groups) == 300 // BLOCK
        await driver.release(grant)
        granted += not computing.done()
    cost = (await computing).report

    print(f"\n{granted} grants in the {cost.prefill_s:.2f} s of a prefill")
    assert granted > GRANTS_BETWEEN_STEPS_MAX


async def test_idle_engines_use_no_cpu_with_or_without_pinned_leases(client: Client, fleet: Fleet):
    await client.tap.until_settled(*ENGINES)
    trees = [[process, *process.children(True)] for process in map(psutil.Process, worker_pids(fleet))]

    offer = await client.driver.offered(PREFILL, random_prompt("pinned", 2000))
    await asyncio.sleep(CACHED_SOON_S)
    pinned = client.tap.exchange_state(PREFILL).pinned_blocks
    used = await asyncio.to_thread(quietest_cpu, trees, enough=IDLE_CPU_MAX)

    print(f"\nidle CPU with {pinned} blocks pinned: {used}")
    assert pinned == 2000 // BLOCK
    assert offer.until_s > time.monotonic()
    assert used < IDLE_CPU_MAX
    await client.driver.taken(DECODE, random_prompt("pinned", 2000), offer)
    await client.tap.until_settled(*ENGINES)


def worker_pids(fleet: Fleet) -> list[int]:
    return [fleet.system.worker_pid(worker) for worker in (PREFILL, DECODE)]


async def test_equal_prompts_that_come_together_are_read_once(client: Client):
    driver, tap, prompt = client.driver, client.tap, random_prompt("together", 1000)
    alone = await client.alone(prompt)
    offers = [await driver.offered(PREFILL, prompt) for _ in range(3)]
    await tap.until_settled(DECODE)
    before = tap.exchange_state(DECODE).read_bytes_total

    answers = await asyncio.gather(*(driver.taken(DECODE, prompt, offer) for offer in offers))
    await tap.until_settled(PREFILL, DECODE)

    assert [answer.token_ids for answer in answers] == [alone] * 3
    assert tap.exchange_state(DECODE).read_bytes_total - before == whole_blocks(1000) * KV_BYTES_PER_TOKEN


async def test_a_store_copies_prompts_and_lends_them_after_its_restart(client: Client):
    driver, tap = client.driver, client.tap
    prompts = {kind: random_prompt(f"stored in {kind}", 20 * BLOCK + 9) for kind in ("memory", "files")}
    warm = {kind: random_prompt(f"warms {kind}", BLOCK) for kind in prompts}
    alone = {kind: await client.alone(prompt) for kind, prompt in prompts.items()}
    await restarted_store(client, empty=True)
    for prompt in (*warm.values(), *prompts.values()):
        await driver.leg(PREFILL, LegKind.AGGREGATED, prompt)
    for prompt in warm.values():
        await until_read(client, STORE, PREFILL, prompt)

    for prompt in prompts.values():
        copied = await driver.fetch(STORE, prompt, driver.source(PREFILL))
        assert (copied.held, copied.fetched, copied.failure) == (0, 20, "")
        assert copied.bytes == 20 * BLOCK * KV_BYTES_PER_TOKEN
        assert (await driver.fetch(STORE, prompt, driver.source(PREFILL))).held == 20
    await tap.until(lambda: tap.loads[STORE].digest.count == 2 * 42, "each block is in memory and in files")

    for kind, prompt in prompts.items():
        if kind == "files":
            await restarted_store(client)
            assert tap.loads[STORE].digest.count == 42
        await until_read(client, DECODE, STORE, warm[kind])
        answer = await driver.leg(DECODE, LegKind.AGGREGATED, prompt, kv_sources=[driver.source(STORE)])
        transfer_report = transfer_report_of(answer)
        assert answer.token_ids == alone[kind], (kind, transfer_report)
        assert transfer_report.fetched_tokens == 20 * BLOCK, (kind, transfer_report)
        assert transfer_report.recomputed_tokens == 9, (kind, transfer_report)
    await tap.until_settled(STORE, *ENGINES)


async def restarted_store(client: Client, *, empty: bool = False) -> None:
    """Restart the store, with its files or without them, until it is ready."""
    tap, before = client.tap, client.tap.loads[STORE].epoch
    client.fleet.restart_store(empty=empty)
    await tap.until(lambda: is_ready_since(tap.loads[STORE], before), "the store is back", STORE_BACK_S_MAX)


async def until_read(client: Client, reader: str, source: str, prompt: list[int]) -> None:
    """Until ``reader`` has the prompt's blocks from ``source``: on a busy machine it takes time to be connected."""
    async with asyncio.timeout(CONNECTED_S_MAX):
        while (await client.driver.fetch(reader, prompt, client.driver.source(source))).failure:
            await asyncio.sleep(AGAIN_S)


def is_ready_since(load: LoadReport, epoch: int) -> bool:
    """Whether a later life of the worker is ready."""
    return load.epoch > epoch and load.phase is WorkerPhase.READY
