"""What was served is in the usage ledger: `baton usage` on a running system."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest

from tests.support.nats_server import free_port
from tests.support.processes import service_process
from tests.support.system import System, baton, until

pytestmark = pytest.mark.nats

PROMPT_TOKENS, COMPLETION_TOKENS = 300, 8
REQUESTS = 3


BODY = {
    "model": "baton-tiny", "prompt": list(range(3, 3 + PROMPT_TOKENS)), "max_tokens": COMPLETION_TOKENS, "ignore_eos": True,
}  # fmt: skip
BUDGET = 2 * (PROMPT_TOKENS + COMPLETION_TOKENS)
NAME = "budgeted"


def used(system: System, key: str) -> dict[str, float]:
    """By column, of this key and the system's model; empty before anything is counted."""
    arguments = ("usage", "--key", key, "--model", "baton-tiny", "--format", "jsonl")
    code, out, err = baton(*arguments, "--state-dir", str(system.folder))
    assert (code, err) == (0, "")
    lines = out.splitlines()
    return json.loads(lines[0]) if lines else {}


def test_requests_without_a_key_are_counted_once(simulated: System):
    before = used(simulated, "(no key)")
    for _ in range(REQUESTS):
        answer = simulated.http.post("/v1/completions", json=BODY)
        assert answer.status_code == 200, answer.text

    def counted() -> dict[str, float] | None:
        now = used(simulated, "(no key)")
        grown = {name: each - before.get(name, 0) for name, each in now.items() if not isinstance(each, str)}
        return grown if grown and grown["requests"] >= REQUESTS else None

    grown = until(counted, "the requests are in the ledger")
    assert grown["requests"] == REQUESTS
    assert grown["prompt_tokens"] == REQUESTS * PROMPT_TOKENS
    assert grown["completion_tokens"] == REQUESTS * COMPLETION_TOKENS
    assert grown["decode_s"] > 0
    code, out, _err = baton("usage", "--state-dir", str(simulated.folder))
    assert code == 0
    assert "(no key)" in out


@contextmanager
def routers(system: System, keys: Path, count: int) -> Iterator[Sequence[httpx.Client]]:
    """More routers of the system, which ask for keys."""
    settings = {"BATON_NATS_URL": system.nats_url, "ROUTER_HOST": "127.0.0.1", "ROUTER_KEYS_FILE": str(keys)}
    with ExitStack() as stack:
        clients = []
        for port in [free_port() for _ in range(count)]:
            stack.enter_context(service_process("router", keys.parent, **settings, ROUTER_PORT=str(port)))
            client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60.0, trust_env=False)
            clients.append(stack.enter_context(client))
        until(lambda: all(map(is_ready, clients)), "the routers are ready")
        yield clients


def is_ready(router: httpx.Client) -> bool:
    try:
        return router.get("/ready").is_success
    except httpx.TransportError:
        return False


def test_a_budget_holds_at_all_routers_and_after_their_restart(simulated: System, tmp_path: Path):
    file = tmp_path / "keys.toml"
    options = ("--tenant", "acme", "--name", NAME, "--monthly-tokens", str(BUDGET), "--file", str(file))
    code, out, err = baton("keys", "new", *options)
    assert code == 0, err
    headers = {"authorization": f"Bearer {out.strip()}"}

    def refuses(router: httpx.Client) -> httpx.Response | None:
        answer = router.post("/v1/completions", json={**BODY, "model": "missing"}, headers=headers)
        return answer if answer.status_code == 429 else None

    with routers(simulated, file, 2) as (one, other):
        for _ in range(2):
            answer = one.post("/v1/completions", json=BODY, headers=headers)
            assert answer.status_code == 200, answer.text
        # Until its prefill leg has reported, a request counts as running, by an estimate of its prompt.
        refused = until(lambda: refuses(one), "the router has counted what it has answered")
        assert refused.json()["error"]["code"] == "insufficient_quota"
        until(lambda: refuses(other), "the other router has read what the first has served")
    with routers(simulated, file, 1) as (later,):
        until(lambda: refuses(later), "a router that was started later has read it too")

    line = used(simulated, NAME)
    assert (line["tenant"], line["key"]) == ("acme", NAME)
    assert line["prompt_tokens"] + line["completion_tokens"] == BUDGET
    _code, out, _err = baton("usage", "--key", NAME, "--state-dir", str(simulated.folder))
    assert f"acme/{NAME}: {BUDGET} of {BUDGET} tokens, 100%" in out
