"""``baton``, ``cache_hit_threshold`` and ``kv_fetch_min_tokens`` in bodies of all four paths, on a whole system."""

from __future__ import annotations

import random
from typing import Any

import httpx
import pytest

from tests.support.system import System, until

pytestmark = pytest.mark.nats

WORDS = ("relay", "runner", "baton", "track", "lane", "start", "curve", "sprint")
PATHS = {
    "/v1/completions": lambda text: {"prompt": text, "max_tokens": 4},
    "/v1/chat/completions": lambda text: {"messages": [{"role": "user", "content": text}], "max_tokens": 4},
    "/v1/messages": lambda text: {"messages": [{"role": "user", "content": text}], "max_tokens": 4},
    "/v1/responses": lambda text: {"input": text, "max_output_tokens": 4},
}
WITH_REASON = ("/v1/completions", "/v1/chat/completions")


def fresh(seed: str) -> str:
    rng = random.Random(seed)
    return " ".join(rng.choice(WORDS) for _ in range(400))


def ask(system: System, path: str, text: str, **fields: Any) -> httpx.Response:
    return system.http.post(path, json={"model": "baton-tiny", **PATHS[path](text), **fields})


@pytest.mark.parametrize("path", PATHS)
def test_a_prompt_below_the_threshold_is_refused_and_one_above_it_is_served(simulated: System, path: str):
    text = fresh(path)
    for stream in (False, True):
        refused = ask(simulated, path, text, cache_hit_threshold=0.8, stream=stream)
        if path in WITH_REASON:
            assert refused.status_code == 200, refused.text
            assert '"finish_reason":"cache_threshold"' in refused.text
        else:
            assert refused.status_code == 412, refused.text
            assert refused.json()["error"]["code"] == "below_threshold"

    served = ask(simulated, path, text, baton={"mode": "aggregated"}, cache_hit_threshold=0.0)
    assert (served.status_code, served.headers["x-baton-mode"]) == (200, "aggregated")
    until(lambda: is_served(ask(simulated, path, text, cache_hit_threshold=0.8)), "the prompt is known to be cached")


def is_served(answer: httpx.Response) -> bool:
    return answer.status_code == 200 and "cache_threshold" not in answer.text


@pytest.mark.parametrize("fields", [{"baton": {"mode": 1}}, {"cache_hit_threshold": -1}, {"kv_fetch_min_tokens": "x"}])
@pytest.mark.parametrize("path", PATHS)
def test_invalid_values_are_400(simulated: System, path: str, fields: dict[str, Any]):
    refused = ask(simulated, path, "hello", **fields)
    assert refused.status_code == 400
    assert next(iter(fields)) in refused.json()["error"]["message"]
