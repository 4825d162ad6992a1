"""Responses to fuzzed requests are those that the OpenAPI document permits."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import checks
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from shared.contracts.engine_paths import PASSED_THROUGH, PLACED, TOKENIZER_INFO
from tests.support.system import System

pytestmark = pytest.mark.nats

EXAMPLES = 50
"""For each path."""
START_S_MAX = 120.0
ANSWER_S_MAX = 60.0
FURTHER = ("/healthcheck", "/baton/decisions", "/v1/decisions", "/v1/load_lora_adapter", "/v1/unload_lora_adapter")
KEPT = (
    *("/v1/files", "/v1/files/{file_id}", "/v1/files/{file_id}/content"),
    *("/v1/batches", "/v1/batches/{batch_id}", "/v1/batches/{batch_id}/cancel"),
    *("/v1/responses/{response_id}", "/v1/responses/{response_id}/cancel", "/v1/responses/{response_id}/input_items"),
)
BREAKAGES = {500, 502, 504}
"""What no input alone may cause, while all workers are well."""


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """All engines answer at once."""
    arguments = ("--open", "--engine", "simulated", "--prefill", "1", "--decode", "1")
    settings = {
        "WORKER_SIMULATED": "prefill_base_s=0,decode_base_s=0",
        "ROUTER_RESPONSE_BYTES_MAX": "1000000",
        "ROUTER_FILES_BYTES_MAX": "1000000",
    }
    with System(tmp_path_factory.mktemp("fuzz"), *arguments, env=settings) as system:
        system.wait_ready(START_S_MAX).until_exact(2)
        yield system


CHECKS = [checks.not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]


def test_fuzzed_requests_get_documented_responses(simulated: System):
    schema = schemathesis.openapi.from_url(f"{simulated.endpoint}/openapi.json")
    operations = [operation.ok() for operation in schema.get_all_operations()]

    for operation in operations:
        for mode in (schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE):
            fuzz(operation, mode)

    assert {"/v1/models", *PLACED, *PASSED_THROUGH, TOKENIZER_INFO, *FURTHER, *KEPT} <= {
        operation.path for operation in operations
    }


def fuzz(operation: schemathesis.APIOperation, mode: schemathesis.GenerationMode) -> None:
    @settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
    @given(case=operation.as_strategy(generation_mode=mode))
    def answers(case: schemathesis.Case) -> None:
        answer = case.call(timeout=ANSWER_S_MAX)

        case.validate_response(answer, checks=CHECKS)
        assert answer.status_code not in BREAKAGES

    with contextlib.suppress(Unsatisfiable):  # an operation without parameters has no wrong ones
        answers()


def test_the_system_is_healthy_after_the_fuzz_campaign(simulated: System):
    simulated.until_idle()
    answer = simulated.http.post("/v1/completions", json={"model": "baton-tiny", "prompt": "x", "max_tokens": 2})

    assert answer.status_code == 200
    assert simulated.metrics().sum("baton_router_refusals_total", reason="internal") == 0
