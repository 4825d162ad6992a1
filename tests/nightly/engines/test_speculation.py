"""Handoffs between real engines with speculative decoding: the draft's KV travels with the model's.

The model drafts for itself, so that nearly every drafted token is accepted where the draft has the KV of the prompt. Greedy
tokens are the model's whatever was drafted, so only the share of accepted drafts tells whether the draft's KV has arrived.
"""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from services.worker.tiny_model import ensure_tiny_model
from shared.contracts.inference import LegKind
from shared.contracts.kv_exchange import KvTransferReport
from tests.engines.forged_reads import ENGINE_ARGS, FORGERY_FILE, Forgery, spoil, spoiled
from tests.support.kv_driver import BLOCK, MODEL, Driver, driving, transfer_report_of
from tests.support.kv_tap import Tap
from tests.support.nats_server import NatsServer
from tests.support.prompts import random_prompt
from tests.support.worker_processes import Answer, ready_workers, start_worker

pytestmark = [pytest.mark.vllm, pytest.mark.nats]

PREFILL, DECODE, PLAIN = "p1", "d1", "plain"
ANSWER = 64
AT_LEAST = 0.98
"""Acceptance after a handoff, as a share of that without one."""
ACCEPTED_MIN = {"draft": AT_LEAST, "eagle": 0.8}
"""Acceptance without a handoff."""


def speculation(**config: object) -> str:
    return f"--speculative-config {shlex.quote(json.dumps({'num_speculative_tokens': 3, **config}))}"


METHODS = {
    "draft": {"method": "draft_model"},
    "eagle": {"method": "eagle"},
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
    target, drafter = drafting_models(method, folder)
    drafting = speculation(**METHODS[method], **({"model": str(drafter)} if drafter else {}))
    decode = {"engine_args": f"{drafting} {ENGINE_ARGS}", "environ": {FORGERY_FILE: str(forgery)}}
    # A drafter that looks for earlier text has no KV: the prefill engine does without.
    prefill = {"engine_args": drafting if drafter else ""}
    with NatsServer(folder, has_buckets=True) as nats:
        model = {"model": str(target), "served_model_name": MODEL, "max_model_len": "2000"}
        with ready_workers(
            nats.url,
            start_worker(nats.url, PREFILL, folder, role="prefill", cpu_cores="0", **model, **prefill),
            start_worker(nats.url, DECODE, folder, role="decode", cpu_cores="1", **model, **decode),
            start_worker(nats.url, PLAIN, folder, role="both", cpu_cores="0", **model),
        ):
            yield nats


def drafting_models(method: str, folder: Path) -> tuple[Path, Path | None]:
    """The model, and the one that drafts for it if there is one."""
    tiny = ensure_tiny_model(folder)
    if method == "eagle":
        return eagle_of(tiny, folder)
    return tiny, tiny if method == "draft" else None


def eagle_of(tiny: Path, folder: Path) -> tuple[Path, Path]:
    """A model with the first layer of this one, and an EAGLE head that computes the same, but for a prompt's first token,
    which heads do not see. A head has no norms before and after its layer: embeddings of unit length need none before,
    and the likeliest token is the same without one after.
    """
    model, head = folder / "one-layer", folder / "eagle"
    shutil.copytree(tiny, model)
    head.mkdir()
    config = {**json.loads((tiny / "config.json").read_text()), "num_hidden_layers": 1}
    weights = {name: array for name, array in load_file(tiny / "model.safetensors").items() if "layers.1." not in name}
    embeddings = weights["model.embed_tokens.weight"]
    weights["model.embed_tokens.weight"] = embeddings / np.sqrt(np.mean(embeddings**2, axis=1, keepdims=True))
    layer = {name.removeprefix("model."): array for name, array in weights.items() if "layers.0." in name}
    del layer["layers.0.input_layernorm.weight"]
    one = np.eye(embeddings.shape[1], dtype=np.float32)
    fed = np.concatenate([one, np.zeros_like(one)], axis=1)  # The token's embedding, nothing of the model's state.
    for path, arrays in ((model, weights), (head, {**layer, "fc.weight": fed})):
        (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
        save_file(arrays, path / "model.safetensors", metadata={"format": "pt"})
    return model, head


@pytest.fixture
async def driver(nats: NatsServer) -> AsyncIterator[Driver]:
    async with Tap(nats.url) as tap, driving(tap) as driver:
        await tap.until(lambda: {PREFILL, DECODE, PLAIN} <= tap.loads.keys(), "all workers say how busy they are")
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
    if method != "ngram":
        # The first token comes with the KV, so drafts begin elsewhere: one may be refused by chance.
        by_chance = 1 / reports[1].drafted_tokens
        assert acceptance(reports[1]) + by_chance >= AT_LEAST * acceptance(reports[0])
        assert acceptance(reports[0]) >= ACCEPTED_MIN[method]
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
