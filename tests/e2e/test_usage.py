"""What was served is in the usage ledger: `baton usage` on a running system."""

from __future__ import annotations

import json

import pytest

from tests.support.system import System, baton, until

pytestmark = pytest.mark.nats

PROMPT_TOKENS, COMPLETION_TOKENS = 300, 8
REQUESTS = 3


def used(system: System, key: str) -> dict[str, float]:
    """By column, of this key and the system's model; empty before anything is counted."""
    arguments = ("usage", "--key", key, "--model", "baton-tiny", "--format", "jsonl")
    code, out, err = baton(*arguments, "--state-dir", str(system.folder))
    assert (code, err) == (0, "")
    lines = out.splitlines()
    return json.loads(lines[0]) if lines else {}


def test_requests_without_a_key_are_counted_once(simulated: System):
    body = {"model": "baton-tiny", "prompt": list(range(3, 3 + PROMPT_TOKENS)), "max_tokens": COMPLETION_TOKENS}
    before = used(simulated, "(no key)")
    for _ in range(REQUESTS):
        answer = simulated.http.post("/v1/completions", json={**body, "ignore_eos": True})
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
