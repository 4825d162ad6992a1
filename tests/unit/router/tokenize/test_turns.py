"""Long work on prompts: tenants take turns, one tenant's long prompt delays no other's, and work ends when its client
leaves.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from functools import partial

import pytest

from services.router.request.fields import read_request
from services.router.tokenize.tokenizer import STEP_CHARS, PromptTokenizer
from services.router.tokenize.turns import TENANT_WAITING_MAX, WAITING_MAX, PromptWork, Turns, Work
from services.worker.tiny_model import CL100K, ensure_tiny_tokenizer
from shared.contracts.control import TokenizerAsset
from shared.contracts.engine_paths import COMPLETIONS
from shared.contracts.workers import HashScheme
from shared.fair_slots import FairSlots, NoTurn
from shared.third_party import LibraryFailed


class ByHand(Executor):
    """A thread whose steps run when the test says so."""

    def __init__(self) -> None:
        self.given: list[Future] = []

    def submit(self, step, *args, **kwargs) -> Future:
        self.given.append(Future())
        self.given[-1].step = partial(step, *args, **kwargs)
        return self.given[-1]

    async def run_one(self) -> None:
        given = self.given.pop(0)
        given.set_result(given.step())
        for _ in range(4):
            await asyncio.sleep(0)


class Client:
    def __init__(self) -> None:
        self.left = False
        self.on_left = []
        self.held = 0

    def hold(self, size: int) -> None:
        self.held += size

    def leave(self) -> None:
        self.left = True
        for told in tuple(self.on_left):
            told()


async def test_a_tenant_with_many_steps_gets_one_turn_of_two():
    thread, ran = ByHand(), []
    turns = Turns(thread)
    many = [asyncio.create_task(turns.run("many", partial(ran.append, f"many {n}"))) for n in range(4)]
    await asyncio.sleep(0)
    few = asyncio.create_task(turns.run("few", partial(ran.append, "few")))
    await asyncio.sleep(0)

    for _ in range(5):
        await thread.run_one()

    assert ran == ["many 0", "many 1", "few", "many 2", "many 3"]
    await asyncio.gather(*many, few)


async def test_a_step_goes_on_in_the_thread_until_another_one_waits():
    thread, ran = ByHand(), []
    turns = Turns(thread)

    def step() -> int:
        ran.append("long")
        if len(ran) == 3:
            other.send(None)  # it begins to wait
        return len(ran)

    other = turns.run("other", partial(ran.append, "short"))
    long = asyncio.create_task(turns.run("t", step, lambda count: count < 5))
    await asyncio.sleep(0)
    await thread.run_one()

    assert await long == 3
    await thread.run_one()
    assert ran == ["long", "long", "long", "short"]
    other.close()


async def test_a_step_is_not_run_again_when_the_work_has_been_stopped():
    thread, ran = ByHand(), []
    work = Work(PromptWork(thread, ByHand()), "t")

    def step() -> int:
        ran.append(1)
        work.stopped = len(ran) == 2
        return len(ran)

    done = asyncio.create_task(work.run(step, again=lambda count: count < 5))
    await asyncio.sleep(0)
    await thread.run_one()

    assert await done == 2


async def test_a_step_whose_request_is_over_does_not_begin():
    thread, ran = ByHand(), []
    turns = Turns(thread)
    first, second, third = (asyncio.create_task(turns.run("t", partial(ran.append, n))) for n in range(3))
    await asyncio.sleep(0)
    second.cancel()
    await asyncio.sleep(0)

    await thread.run_one()
    await thread.run_one()

    assert ran == [0, 2]
    assert second.cancelled()
    await asyncio.gather(first, third)


async def test_no_step_begins_once_the_router_ends():
    quick, slow = ThreadPoolExecutor(1), ByHand()
    work = PromptWork(quick, slow)
    first, waiting = (asyncio.create_task(Work(work, "t").run(lambda: 1, slow=True)) for _ in range(2))
    await asyncio.sleep(0)

    work.close()
    await slow.run_one()

    assert await first == 1
    for late in (waiting, Work(work, "t").run(lambda: 2), Work(work, "u").run(lambda: 3, slow=True)):
        with pytest.raises(NoTurn):
            await late
    assert slow.given == []


async def test_the_steps_that_wait_are_bounded_for_each_tenant_and_in_all():
    turns = Turns(ByHand())
    waiting = []

    async def refused(tenant: str) -> bool:
        waiting.append(asyncio.create_task(turns.run(tenant, int)))
        await asyncio.sleep(0)
        return waiting[-1].done()

    assert not await refused("running")
    assert [await refused("greedy") for _ in range(TENANT_WAITING_MAX + 1)].index(True) == TENANT_WAITING_MAX
    others = WAITING_MAX - TENANT_WAITING_MAX
    assert not any([await refused(f"tenant {n}") for n in range(others)])
    assert await refused("one more")
    with pytest.raises(NoTurn):
        await waiting[-1]
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> PromptTokenizer:
    directory = ensure_tiny_tokenizer(tmp_path_factory.mktemp("cache"))
    asset = TokenizerAsset(worker_id="w1", epoch=1, tokenizer_json=(directory / "tokenizer.json").read_bytes())
    return PromptTokenizer(asset, HashScheme(block_size=16), cache_bytes_max=1 << 20)


def of_text(tokenizer: PromptTokenizer, text: str, work: Work):
    facts = read_request(COMPLETIONS, b'{"model":"m","prompt":"%b"}' % text.encode())
    return tokenizer.prompt(facts, lambda _block: True, work=work, loop_chars_max=100)


async def test_a_small_prompt_does_not_wait_for_text_that_cannot_be_cut(tokenizer):
    slow = ByHand()
    with ThreadPoolExecutor(1) as quick:
        both = PromptWork(quick, slow)
        big = asyncio.create_task(of_text(tokenizer, "a" * (8 * STEP_CHARS), Work(both, "big")))
        while not slow.given:
            await asyncio.sleep(0.001)

        small = await of_text(tokenizer, "a few words " * 100, Work(both, "small"))

        assert small is not None
        assert not big.done()
        while not big.done():
            if slow.given:
                await slow.run_one()
            await asyncio.sleep(0.001)
        assert (await big).exact


async def test_the_work_ends_when_the_client_leaves_and_nothing_stays_held(tokenizer):
    quick, client = ByHand(), Client()
    work = Work(PromptWork(quick, ByHand()), "t", client)
    begun = asyncio.create_task(of_text(tokenizer, "some words " * 1000, work))
    await asyncio.sleep(0)
    assert client.held > 0

    client.leave()

    assert await begun is None
    assert (client.held, client.on_left, work.is_stopped()) == (0, [], True)
    assert await of_text(tokenizer, "some other words " * 1000, Work(PromptWork(quick, quick), "t", client)) is None


class Users:
    """Each stays in its place until it is sent away."""

    def __init__(self, count: int, **bounds: int) -> None:
        self.slots = FairSlots(count, **({"waiting_max": 8, "tenant_waiting_max": 4} | bounds))
        self.inside: list[str] = []
        self.left: dict[str, asyncio.Event] = {}

    def begin(self, tenant: str, name: str) -> asyncio.Task[None]:
        self.left[name] = asyncio.Event()
        return asyncio.create_task(self._stay(tenant, name))

    async def _stay(self, tenant: str, name: str) -> None:
        async with self.slots.slot(tenant):
            self.inside.append(name)
            await self.left[name].wait()

    async def leave(self, name: str) -> None:
        self.left[name].set()
        await settle()


async def settle() -> None:
    for _ in range(6):
        await asyncio.sleep(0)


async def test_tenants_take_turns():
    users = Users(1)
    for number in range(3):
        users.begin("many", f"many {number}")
    users.begin("few", "few")
    await settle()

    for name in ("many 0", "many 1", "few"):
        await users.leave(name)

    assert users.inside == ["many 0", "many 1", "few", "many 2"]
    await users.leave("many 2")


async def test_those_who_wait_are_bounded():
    users = Users(1, waiting_max=3, tenant_waiting_max=2)
    waiting = [users.begin("a", f"a {number}") for number in range(3)]
    await settle()

    with pytest.raises(NoTurn):
        await users.begin("a", "too many of a")
    waiting.append(users.begin("b", "b"))
    await settle()
    with pytest.raises(NoTurn):
        await users.begin("c", "too many of all")

    for one in waiting:
        one.cancel()
    await settle()


async def test_a_place_given_to_one_who_leaves_goes_to_the_next():
    users = Users(1)
    first, second, third = (users.begin("a", name) for name in ("first", "second", "third"))
    await settle()

    users.left["first"].set()
    await first
    second.cancel()
    await settle()

    assert users.inside[-1] == "third"
    third.cancel()
    await settle()
    last = users.begin("b", "last")
    await settle()
    assert users.inside[-1] == "last"
    last.cancel()


class Panic(BaseException):
    """As pyo3's PanicException."""


async def test_a_panic_in_the_thread_is_an_exception_and_the_next_step_runs():
    def panics() -> None:
        raise Panic("a library's bug")

    with ThreadPoolExecutor(1) as thread:
        turns = Turns(thread)
        with pytest.raises(LibraryFailed, match="Panic: a library's bug"):
            await turns.run("t", panics)

        assert await turns.run("t", lambda: 1) == 1


async def test_a_prompt_at_which_the_tokenizer_panics_is_guessed(tmp_path):
    json = (ensure_tiny_tokenizer(tmp_path, CL100K) / "tokenizer.json").read_bytes()
    asset = TokenizerAsset(worker_id="w", epoch=1, tokenizer_json=json)
    tokenizer = PromptTokenizer(asset, HashScheme(block_size=16), cache_bytes_max=1 << 20)
    tokenizer._segments._words._tokenizer = Panicking()
    body = b'{"model":"m","prompt":"%b"}' % (b"never seen before " * 400)
    work = PromptWork.in_threads()
    try:
        facts = read_request(COMPLETIONS, body)
        for loop_chars_max in (1 << 20, 0):
            assert await tokenizer.prompt(facts, bool, work=Work(work, "t"), loop_chars_max=loop_chars_max) is None
    finally:
        work.close()


class Panicking:
    """Of the tokenizers library."""

    def encode_batch_fast(self, *_: object, **_options: object) -> None:
        raise Panic("a library's bug")
