"""Batches of several tenants: one that cannot go on, or has very many, keeps no other's from being served."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import pytest
from openai import OpenAI

from shared.contracts.api_keys import digest_of
from tests.support.system import System, until

pytestmark = pytest.mark.nats

CHAT = "/v1/chat/completions"
SPEEDS = "prefill_tokens_per_s=100000,prefill_base_s=0,decode_base_s=0.02"
TOKENS = 100
"""A line takes 2 s."""
LINES = 20
ATTACKER_LINES = 60
TWICE = 2.0
POLLED_S = 1.0
"""What polling, storing and a busy machine add to either time."""
START_S_MAX = 120.0
ENDED = ("completed", "failed", "expired", "cancelled")
LIMITS = {"acme": "", "limited": "requests_per_minute = 20", "spent": "monthly_tokens = 1", "many": ""}


def key_of(tenant: str) -> str:
    return f"key-{tenant}"


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    folder = tmp_path_factory.mktemp("batch-tenants")
    keys = folder / "keys.toml"
    entries = (
        f'[[key]]\ntenant = "{tenant}"\nsha256 = "{digest_of(key_of(tenant))}"\n{limit}\n'
        for tenant, limit in LIMITS.items()
    )
    keys.write_text(f'salt = "{"s" * 32}"\n' + "".join(entries))
    settings = {
        "WORKER_SIMULATED": SPEEDS, "ROUTER_FILES_BYTES_MAX": "10000000", "ROUTER_KEYS_FILE": str(keys)
    }  # fmt: skip
    arguments = ("--open", "--engine", "simulated", "--both", "1")
    with System(folder, *arguments, env=settings) as system:
        yield system.wait_ready(START_S_MAX)


def client_of(system: System, tenant: str) -> OpenAI:
    return OpenAI(base_url=f"{system.endpoint}/v1", api_key=key_of(tenant), max_retries=0, timeout=60)


def begin(client: OpenAI, count: int) -> str:
    """Have a batch of so many lines served: its id."""
    body = {"model": "baton-tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": TOKENS}
    lines = ({"custom_id": f"c{n}", "method": "POST", "url": CHAT, "body": {**body, "seed": n}} for n in range(count))
    file = client.files.create(file=("in.jsonl", "\n".join(map(json.dumps, lines)).encode()), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h").id


def served_s(client: OpenAI) -> float:
    """Seconds until all lines of a batch are answered."""
    begun = time.monotonic()
    batch_id = begin(client, LINES)

    def look():
        batch = client.batches.retrieve(batch_id)
        return batch if batch.status in ENDED else None

    batch = until(look, f"{LINES} lines are answered", 120.0)
    assert (batch.status, batch.request_counts.completed) == ("completed", LINES)
    return time.monotonic() - begun


@pytest.fixture(scope="module")
def alone_s(system: System) -> float:
    """How long the batch takes alone."""
    with client_of(system, "acme") as acme:
        return served_s(acme)


@pytest.mark.parametrize(("attacker", "batches"), [("limited", 1), ("spent", 5), ("many", 5)])
def test_a_tenants_batch_takes_at_most_twice_as_long_beside_those_of_another(
    system: System, alone_s: float, attacker: str, batches: int
):
    """The other one is at its rate limit, has spent its budget, or has lines enough for all slots."""
    answered = lines_answered(system)
    with client_of(system, attacker) as other:
        for _ in range(batches):
            begin(other, ATTACKER_LINES)
    until(lambda: lines_answered(system) > answered, "lines of the other tenant are answered")
    with client_of(system, "acme") as acme:
        beside_s = served_s(acme)
    print(f"{attacker}: alone {alone_s:.1f} s, beside {beside_s:.1f} s")
    assert beside_s <= TWICE * alone_s + POLLED_S


def lines_answered(system: System) -> float:
    return system.metrics().sum("baton_router_batch_lines_total")
