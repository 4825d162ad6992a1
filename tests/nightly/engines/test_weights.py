"""Weights that change in place on a prefill and a decode engine, by the calls of vLLM's server: KV of other weights is
never used, requests in flight are kept, aborted or finished, and all workers of the model move together.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.support.checkpoints import make_broken_checkpoint, make_checkpoint, tiny_model
from tests.support.prompts import VOCABULARY
from tests.support.system import System, baton, until
from tests.support.worker_processes import ready_workers, start_worker

pytestmark = [pytest.mark.vllm, pytest.mark.nats]

GENERATE = "/inference/v1/generate"
MODEL = "baton-tiny"
START_S_MAX = 480.0
BLOCK = 32
PROMPTS = [random.Random(f"weights {number}").choices(VOCABULARY, k=400 + 50 * number) for number in range(3)]
TOKENS = 24


@dataclass
class Trainer:
    """Changes the weights of a system as prime-rl does, and asks it as its environments do."""

    system: System
    folder: Path

    def post(self, path: str, json: Any = None, **query: str) -> httpx.Response:
        return self.system.http.post(path, json=json, params={"model": MODEL, **query}, timeout=120.0)

    def load(self, name: str, mode: str = "keep") -> httpx.Response:
        assert self.post("/pause", mode=mode, clear_cache="false").json() == {"status": "paused"}
        try:
            return self.post("/update_weights", {"weight_dir": str(self.folder / name)})
        finally:
            assert self.post("/resume").json() == {"status": "resumed"}

    def ask(
        self, prompt: list[int], model: str = MODEL, mode: str = "disaggregated", **sampling: Any
    ) -> dict[str, Any]:
        """The answer, with the headers of its response."""
        asked = {"max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "logprobs": 1, **sampling}
        body = {"model": model, "token_ids": prompt, "sampling_params": asked}
        reply = self.system.http.post(GENERATE, json=body, headers={"x-baton-mode": mode}, timeout=120.0)
        assert reply.status_code == 200, reply.text
        return {**reply.json(), "headers": dict(reply.headers)}

    def tokens(self, model: str = MODEL, mode: str = "disaggregated") -> list[list[int]]:
        return [self.ask(prompt, model, mode)["choices"][0]["token_ids"] for prompt in PROMPTS]

    def records(self) -> dict[str, dict[str, Any]]:
        fleet = self.system.fleet()
        return {name: {**one["record"], "phase": one["phase"]} for name, one in fleet.items() if name != "fresh"}

    def until_ready(self, weights: str) -> None:
        """Both workers serve with the weights of this version, and routers know their tokenizer and caches."""

        def are_ready() -> bool:
            found = self.records().values()
            names = {one["fingerprint"].get("weights", "").partition("#")[0] for one in found}
            return len(found) == 2 and {one["phase"] for one in found} == {"ready"} and names == {weights}

        until(are_ready, f"both workers serve {weights}", 300.0)


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trainer]:
    """1P1D with baton-tiny's weights, and a fresh engine that has started with those of ``b``."""
    folder = tmp_path_factory.mktemp("weights")
    checkpoints = folder / "checkpoints"
    checkpoints.mkdir()
    shutil.copytree(tiny_model(), checkpoints / "a")
    make_checkpoint(checkpoints / "b", seed=1)
    make_broken_checkpoint(checkpoints / "broken")
    few = {"WORKER_KV_FETCH_MIN_TOKENS": str(BLOCK), "ROUTER_FETCH_TOKENS_MIN": str(BLOCK)}
    env = {"WORKER_WEIGHTS_DIR": str(checkpoints), "ROUTER_STREAM_TOKENS_MIN": "0", **few}
    arguments = ("--prefill", "1", "--decode", "1", "--open")
    with System(folder / "state", *arguments, env=env) as system:
        system.wait_ready(START_S_MAX)
        fresh = start_worker(
            system.nats_url, "fresh", folder, model=str(checkpoints / "b"), served_model_name="fresh-b", role="both"
        )
        with ready_workers(system.nats_url, fresh):
            trainer = Trainer(system, checkpoints)
            trainer.until_ready("")
            yield trainer


def test_kv_of_other_weights_is_never_used(trainer: Trainer):
    first = trainer.tokens()
    again = trainer.tokens()
    fresh = trainer.tokens("fresh-b", "aggregated")
    assert first == again == trainer.tokens(mode="aggregated")
    assert all(one != other for one, other in zip(first, fresh, strict=True))

    assert trainer.load("b").json() == {"message": "Weights updated"}
    trainer.until_ready("b")
    told = trainer.ask(PROMPTS[0])
    after = trainer.tokens()

    assert after == fresh
    assert told["headers"]["x-baton-prefill-worker"] == "prefill-1"
    assert told["headers"]["x-baton-decode-worker"] == "decode-1"
    assert told["choices"][0]["weight_versions"] == [{"version": "b", "start": 0, "end": TOKENS}]
    assert (told["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") in (None, 0)
    assert trainer.tokens(mode="aggregated") == fresh
    cached = trainer.ask(PROMPTS[0])["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached == len(PROMPTS[0]) // BLOCK * BLOCK
    assert trainer.system.http.get("/weight_info", params={"model": MODEL}).json() == {"weight_version": "b"}
    records = trainer.records()
    assert len({one["fingerprint"]["weights"] for one in records.values()}) == 1
    assert len({one["hashing"]["seed"] for one in records.values()}) == 1

    assert trainer.load("a", mode="wait").status_code == 200
    trainer.until_ready("a")
    assert trainer.tokens() == first


def test_the_routers_hashes_are_those_of_the_engines_with_new_weights(trainer: Trainer):
    """A text is tokenized and hashed by the router: its next turn is expected where it is cached."""
    text = "The runner takes the baton and the crowd stands up. " * 30
    body = {"model": MODEL, "prompt": text, "max_tokens": 4, "temperature": 0}

    def is_expected() -> bool:
        reply = trainer.system.http.post("/v1/completions", json=body, headers={"x-baton-mode": "disaggregated"})
        decision = trainer.system.http.get(f"/baton/decisions/{reply.headers['x-baton-decision']}").json()
        return decision["exact"] and decision["predicted_cached_tokens"] == decision["cached_tokens"] > BLOCK

    until(is_expected, "the router expects what is cached", 60.0)


def without_ids(answer: Any) -> Any:
    """A probability's last digits depend on what was computed together; how much was cached, on what came before."""
    if isinstance(answer, float):
        return pytest.approx(answer, abs=1e-3)
    if isinstance(answer, dict):
        random_or_timed = {"id", "request_id", "created", "usage"}
        return {name: without_ids(value) for name, value in answer.items() if name not in random_or_timed}
    return [without_ids(one) for one in answer] if isinstance(answer, list) else answer


ROLLOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "token ids, as prime-rl asks": (
        GENERATE,
        {
            "token_ids": PROMPTS[2],
            "sampling_params": {
                "temperature": 0.0,
                "max_tokens": 16,
                "stop_token_ids": [2],
                "logprobs": 1,
                "skip_special_tokens": False,
            },
        },
    ),
    "a chat with its token ids, as agents ask": (
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": "Run with the baton. " * 40}],
            "temperature": 0.0,
            "max_tokens": 16,
            "logprobs": True,
            "top_logprobs": 1,
            "return_token_ids": True,
        },
    ),
    "a completion of token ids with its token ids": (
        "/v1/completions",
        {"prompt": PROMPTS[2], "temperature": 0.0, "max_tokens": 16, "logprobs": 1, "return_token_ids": True},
    ),
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(("path", "body"), ROLLOUTS.values(), ids=ROLLOUTS.keys())
def test_rollouts_get_the_same_from_two_engines_as_from_one(
    trainer: Trainer, path: str, body: dict[str, Any], stream: bool
):
    answers = []
    for mode in ("aggregated", "disaggregated"):
        asked = {"model": MODEL, "cache_salt": f"{mode} {stream} {path}".replace("/", "."), "stream": stream, **body}
        reply = trainer.system.http.post(path, json=asked, headers={"x-baton-mode": mode}, timeout=120.0)
        assert reply.status_code == 200, reply.text
        assert reply.headers["x-baton-mode"] == mode
        if stream:
            events = [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: {")]
            choices = [choice for event in events for choice in event["choices"]]
            ids = [token for choice in choices for token in choice.get("token_ids") or []]
            ends = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
            answers.append(
                {
                    "ids": ids,
                    "ends": ends,
                    "prompt": [e["prompt_token_ids"] for e in events if e.get("prompt_token_ids")],
                }
            )
        else:
            answers.append(reply.json())

    alone, apart = answers
    assert without_ids(apart) == without_ids(alone)
    assert apart["ids"] if stream else apart["choices"][0]["token_ids"]


@pytest.mark.parametrize("mode", ["keep", "abort", "wait"])
def test_requests_in_flight_are_kept_aborted_or_finished(trainer: Trainer, mode: str):
    begun: Future[None] = Future()

    def stream() -> dict[str, Any]:
        asked = {"max_tokens": 1500, "temperature": 0, "ignore_eos": True}
        body = {"model": MODEL, "token_ids": PROMPTS[1], "sampling_params": asked, "stream": True}
        tokens, ends, versions = 0, [], []
        with trainer.system.http.stream("POST", GENERATE, json=body, timeout=120.0) as reply:
            for line in reply.iter_lines():
                if line.startswith("data: {"):
                    (choice,) = json.loads(line[6:])["choices"]
                    tokens += len(choice["token_ids"] or [])
                    ends += [choice["finish_reason"]] if choice["finish_reason"] else []
                    versions += choice["weight_versions"] or []
                    if not begun.done():
                        begun.set_result(None)
        return {"tokens": tokens, "ends": ends, "versions": versions}

    with ThreadPoolExecutor(1) as other:
        streamed = other.submit(stream)
        begun.result(60.0)
        assert trainer.load("b" if mode != "keep" else "a", mode).status_code == 200
        told = streamed.result(120.0)
    trainer.until_ready("b" if mode != "keep" else "a")

    assert told["ends"] == ["abort" if mode == "abort" else "length"]
    assert (told["tokens"] == 1500) == (mode != "abort")
    if mode == "keep":
        assert [one["version"] for one in told["versions"]][-1] == "a"
        assert told["versions"][-1]["end"] == 1500


def test_a_folder_that_is_not_there_changes_nothing(trainer: Trainer):
    before = {name: one["fingerprint"] for name, one in trainer.records().items()}

    for name in ("missing", "../../etc"):
        reply = trainer.post("/update_weights", {"weight_dir": name})
        assert reply.status_code == 500
        assert "decode-1: " in reply.json()["error"]["message"]

    assert {name: one["fingerprint"] for name, one in trainer.records().items()} == before


def test_what_a_cpu_engine_lacks_is_named(trainer: Trainer):
    reply = trainer.post("/init_weight_transfer_engine", {"init_info": {"master_address": "x", "rank_offset": 1}})

    assert reply.status_code == 500
    assert "weight_transfer_config" in reply.json()["error"]["message"]
    assert trainer.post("/finish_weight_update", {}).status_code == 500
    assert trainer.system.http.get("/get_world_size", params={"model": MODEL}).json() == {"world_size": 2}


def test_a_worker_that_starts_later_loads_the_models_weights_before_it_serves(trainer: Trainer):
    where = ("--model", MODEL, "--state-dir", str(trainer.system.folder), "--json")
    code, out, err = baton("weights", "load", "b", "--mode", "keep", *where, s_max=120.0)
    assert (code, [one["failure"] for one in json.loads(out)["changes"]]) == (0, ["", ""]), err
    trainer.until_ready("b")
    fresh = trainer.tokens("fresh-b", "aggregated")
    pid = trainer.system.worker_pid("decode-1")

    psutil.Process(pid).kill()
    until(lambda: trainer.records().get("decode-1", {}).get("pid", pid) != pid, "decode-1 is restarted", 120.0)
    trainer.until_ready("b")

    assert trainer.tokens() == fresh


def test_workers_whose_update_fails_start_again_with_the_weights_that_are_wanted(trainer: Trainer):
    assert trainer.load("b").status_code == 200
    trainer.until_ready("b")
    fresh = trainer.tokens("fresh-b", "aggregated")
    pids = {name: one["pid"] for name, one in trainer.records().items()}

    assert trainer.post("/pause", mode="keep", clear_cache="false").status_code == 200
    reply = trainer.post("/update_weights", {"weight_dir": str(trainer.folder / "broken")})

    assert reply.status_code == 500
    assert "prefill-1: " in reply.json()["error"]["message"]
    until(lambda: trainer.post("/resume").status_code == 200, "the model is resumed", 180.0)

    def are_new() -> bool:
        found = trainer.records()
        return found.keys() == pids.keys() and all(found[name]["pid"] != pid for name, pid in pids.items())

    until(are_new, "both workers have started again", 180.0)
    trainer.until_ready("b")
    assert trainer.tokens() == fresh
    assert trainer.load("a").status_code == 200
    trainer.until_ready("a")
    assert trainer.tokens() != fresh
