"""Two tenants with API keys of their own: neither learns what the other has asked, by numbers or by time."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator, Sequence
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from services.launcher.cli import app as baton
from shared.contracts.api_keys import digest_of
from tests.support.nats_server import free_port
from tests.support.processes import service_process
from tests.support.system import EXACT, Metrics, System, until

pytestmark = pytest.mark.nats

ACME, RIVAL, OPEN, OPEN_TOO = "key-acme", "key-rival", "key-open", "key-open-too"
TOKENS = 3000
"""30 ms of the simulated engines' work, which a cached prompt does not take."""
ROUNDS = 20
ENGINES = 4
BLOCK = 64
"""Of a prompt, less than so many tokens at its end are never cached."""
Z_SEEN, Z_MAX = 3.0, 4.0
"""Two samples of one distribution are farther apart once in 16,000 times."""
MODEL = "baton-tiny"


def key_lines(key: str, tenant: str, more: str = "") -> str:
    return f'[[key]]\ntenant = "{tenant}"\nsha256 = "{digest_of(key)}"\n{more}\n'


@pytest.fixture(scope="module")
def router(simulated: System, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """One more router of the system, which asks for keys: as ``baton keys`` writes them, and some that are known here."""
    folder, port = tmp_path_factory.mktemp("tenants"), free_port()
    file = folder / "keys.toml"
    made = CliRunner().invoke(baton, ["keys", "new", "--tenant", "made", "--file", str(file)])
    assert made.exit_code == 0, made.output
    with file.open("a") as keys:
        keys.write(key_lines(ACME, "acme") + key_lines(RIVAL, "rival"))
        keys.write(key_lines(OPEN, "open", "public_cache = true") + key_lines(OPEN_TOO, "other", "public_cache = true"))
    settings = {
        "BATON_NATS_URL": simulated.nats_url, "ROUTER_PORT": str(port), "ROUTER_HOST": "127.0.0.1",
        "ROUTER_KEYS_FILE": str(file), "ROUTER_TOKENIZE": "always",
    }  # fmt: skip
    with (
        service_process("router", folder, **settings),
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60.0, trust_env=False) as client,
    ):
        until(lambda: knows_all(client), "the router knows what all engines hold")
        ask_again(client, made.stdout.strip(), fresh(random.Random(6)))  # and how they tokenize
        yield client


def knows_all(client: httpx.Client) -> bool:
    try:
        told = client.get("/metrics")
    except httpx.TransportError:
        return False
    return told.is_success and Metrics(told.text).sum("baton_router_index_state", state=EXACT) >= ENGINES


def fresh(rng: random.Random) -> list[int]:
    return [rng.randrange(3, 500) for _ in range(TOKENS)]


def ask(router: httpx.Client, key: str, prompt: Sequence[int], **fields: Any) -> tuple[int, float]:
    """Cached tokens, and how long the one token took."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 1, **fields}
    begun = time.perf_counter()
    answer = router.post("/v1/completions", json=body, headers={"authorization": f"Bearer {key}"})
    took_s = time.perf_counter() - begun
    assert answer.status_code == 200, answer.text
    return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"], took_s


def ask_again(router: httpx.Client, key: str, prompt: Sequence[int], **fields: Any) -> float:
    """How long the token took once the router had heard that the prompt is cached."""

    def when_cached() -> float:
        cached, took_s = ask(router, key, prompt, **fields)
        return took_s if cached > TOKENS - BLOCK else 0.0

    return float(until(when_cached, "who asks again finds its prompt cached"))


def z_of(first: Sequence[float], second: Sequence[float]) -> float:
    """By how many standard deviations the ranks of ``first`` are below what chance would give (Mann and Whitney)."""
    pairs = len(first) * len(second)
    below = sum((one < other) + 0.5 * (one == other) for one in first for other in second)
    return (below - pairs / 2) / math.sqrt(pairs * (len(first) + len(second) + 1) / 12)


def test_neither_cached_tokens_nor_latency_reveal_another_tenants_prompts(router: httpx.Client):
    rng = random.Random(7)
    cold: list[float] = []
    again: list[float] = []
    after_others: list[float] = []
    after_nobody: list[float] = []

    for _ in range(ROUNDS):
        prompt, other = fresh(rng), fresh(rng)
        cached, took_s = ask(router, ACME, prompt)
        assert cached == 0
        cold.append(took_s)
        rivals = [(prompt, after_others), (other, after_nobody)]
        rng.shuffle(rivals)
        for asked, samples in rivals:
            cached, took_s = ask(router, RIVAL, asked)
            assert cached == 0
            samples.append(took_s)
        again.append(ask_again(router, ACME, prompt))

    assert z_of(again, cold) > Z_SEEN  # so the measurement sees a cache where there is one
    assert abs(z_of(after_others, after_nobody)) < Z_MAX


@pytest.mark.parametrize("mode", ["disaggregated", "aggregated"])
def test_tenants_share_no_blocks_in_any_mode(router: httpx.Client, mode: str):
    prompt, baton_field = fresh(random.Random(mode)), {"baton": {"mode": mode}}

    assert [ask(router, key, prompt, **baton_field)[0] for key in (ACME, RIVAL)] == [0, 0]
    ask_again(router, ACME, prompt, **baton_field)
    assert ask(router, ACME, prompt, cache_salt="project", **baton_field)[0] == 0


def test_public_prefixes_are_shared_between_tenants_that_declare_them(router: httpx.Client):
    prompt = fresh(random.Random(8))

    assert ask(router, OPEN, prompt)[0] == 0
    ask_again(router, OPEN_TOO, prompt)
    assert ask(router, ACME, prompt)[0] == 0


def test_a_tenant_prefetches_and_finds_only_its_own(router: httpx.Client):
    prompt, ordered = fresh(random.Random(9)), {"prefetch": True}
    ask_again(router, ACME, prompt)

    def order(key: str, **more: Any) -> httpx.Response:
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 1, "baton": {**ordered, **more}}
        return router.post("/v1/completions", json=body, headers={"authorization": f"Bearer {key}"})

    def has_own() -> bool:
        own = order(ACME).raise_for_status().json()
        return bool(own["held_tokens"] + own["fetched_tokens"] > TOKENS - BLOCK)

    until(has_own, "the router knows how the engines tokenize, and what they hold")
    rivals = order(RIVAL).raise_for_status().json()
    assert (rivals["held_tokens"], rivals["fetched_tokens"]) == (0, 0)
    assert ask(router, RIVAL, prompt)[0] == 0
    assert order(ACME, sources=["prefill-1"]).status_code == 403
    assert order("nobody").status_code == 401


def test_requests_without_a_valid_key_are_401(router: httpx.Client):
    answer = router.post("/v1/completions", json={"model": MODEL, "prompt": "x"})

    assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
    assert router.get("/v1/models").status_code == 401
    assert router.get("/ready").status_code == 200
