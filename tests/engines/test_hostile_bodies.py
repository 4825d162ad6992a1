"""Bodies and headers of clients harm neither an engine nor the reports about other requests."""

from __future__ import annotations

import asyncio

import pytest

from shared.contracts.inference import LegKind
from tests.engines.test_handover import completion, prompt_of

pytestmark = pytest.mark.vllm

BLOCK = 32


@pytest.mark.parametrize("kind", [LegKind.AGGREGATED, LegKind.PREFILL, LegKind.DECODE])
@pytest.mark.parametrize("name", ["kv_transfer_params", "ec_transfer_params", "kv_cache_report_mode"])
async def test_clients_cannot_set_internal_engine_parameters(pair, router, kind, name):
    hostile = completion(f"{kind} {name} {prompt_of(40, seed=91)}", vllm_xargs={name: "take this"})

    answer = await router.leg(pair[1], kind, hostile)
    after = await router.leg(pair[1], LegKind.AGGREGATED, completion(prompt_of(40, seed=92)))

    assert (answer.status, answer.failure) == (200, None)
    assert (after.status, after.failure) == (200, None)


async def test_requests_with_the_same_id_keep_separate_records(pair, router):
    known, new = completion(prompt_of(200, seed=93)), completion(prompt_of(190, seed=94))
    prompt_tokens = (await router.leg(pair[1], LegKind.AGGREGATED, known)).report.prompt_tokens

    first, second = await asyncio.gather(
        *(router.leg(pair[1], LegKind.AGGREGATED, body, request_id="the-same") for body in (known, new))
    )

    assert first.report.cached_tokens == (prompt_tokens - 1) // BLOCK * BLOCK
    assert second.report.cached_tokens == 0
    assert len(first.token_ids) == len(second.token_ids) == 24


@pytest.mark.parametrize("prompt", [b'"\xff"', b"[1," + b"9" * 5000 + b"]", b"[" * 990 + b"]" * 990])
async def test_an_invalid_prompt_gets_the_engines_own_error(pair, router, prompt):
    body = b'{"model":"baton-tiny","prompt":' + prompt + b"}"

    prefill = await router.leg(pair[0], LegKind.PREFILL, body)
    decode = await router.leg(pair[1], LegKind.DECODE, body)

    assert (prefill.status, prefill.report.kv_transfer) in ((200, b""), (400, b""))
    assert (decode.status, decode.failure) == (400, None)
