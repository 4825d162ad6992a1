"""What vLLM says against its configuration reaches the operator; a hub that is out of reach is no wrong configuration."""

from __future__ import annotations

from typing import Annotated

import pytest

from services.worker.engines.vllm.engine import has_failed_to_read, refusal_of

pydantic = pytest.importorskip("pydantic")


def refused(cause: Exception) -> Exception:
    """As vLLM's configuration raises it."""

    def check(_value: str) -> str:
        raise ValueError("max_model_len is too large") from cause

    checked = pydantic.TypeAdapter(Annotated[str, pydantic.AfterValidator(check)])
    with pytest.raises(ValueError, match="max_model_len") as raised:
        checked.validate_python("anything")
    return raised.value


def test_what_vllm_says_is_told_without_what_pydantic_adds():
    assert refusal_of(refused(KeyError("rope"))) == "max_model_len is too large"
    assert refusal_of(NotImplementedError("no such head size")) == "no such head size"


def test_files_that_could_not_be_read_may_be_readable_at_another_start():
    assert has_failed_to_read(refused(ConnectionError("the hub does not answer")))
    assert not has_failed_to_read(refused(KeyError("rope")))
