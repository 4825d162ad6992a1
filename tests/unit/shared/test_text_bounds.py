"""Texts that a tokenizer takes too long for, or panics at, are refused before it gets them; what it throws is contained."""

from __future__ import annotations

import asyncio

import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from services.worker.tiny_model import CL100K
from shared.contracts.request_body import (
    RUN_CHARS_MIN,
    TOKENS_ANSWERED_MIN,
    prompt_chars_max,
    text_fault,
    tokens_answered_max,
)
from shared.third_party import CONTAINED, ENDS, LibraryFailed

LONG = 131_072
"""Tokens of a model's context."""


@pytest.mark.parametrize("model_len", [2048, LONG])
@pytest.mark.parametrize("text", [" " * 11_000_000, "a" * 30_000_000, "a " * 15_000_000, "\n" * 30_000_000])
def test_texts_that_no_model_of_this_length_reads_are_refused(text, model_len):
    assert text_fault(text, model_len)


@pytest.mark.parametrize("one", ["a", " ", "\n", "語", "\u3000"])
def test_a_run_that_cannot_be_divided_is_refused_wherever_it_begins(one):
    run = 4 * LONG
    for before in (0, 1, run // 2, run - 1):
        assert text_fault("ab " * (before // 3) + one * 2 * run, LONG)
        assert not text_fault("ab " * (before // 3) + one * (run - 1), LONG)


@pytest.mark.parametrize("text", ["", "a", "word " * (LONG * 3), "a" * (RUN_CHARS_MIN - 1), "語" * LONG * 2])
def test_texts_that_fit_are_not_refused(text):
    assert not text_fault(text, LONG)


def test_the_message_says_what_to_do():
    assert f"at most {prompt_chars_max(LONG)} are tokenized" in text_fault("a " * 15_000_000, LONG)
    assert text_fault("a " * 15_000_000, LONG).endswith("Send it in several requests")
    assert text_fault("a" * 2_000_000, LONG).endswith("Divide it")


def test_the_tokens_of_an_answer_suffice_for_the_model():
    assert tokens_answered_max(2048) == TOKENS_ANSWERED_MIN
    assert tokens_answered_max(1 << 20) > 1 << 20


def test_the_librarys_panic_is_an_exception():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(CL100K), behavior="isolated")

    with pytest.raises(LibraryFailed, match="PanicException"), CONTAINED:
        tokenizer.encode(" " * 11_000_000)


@pytest.mark.parametrize("error", [*ENDS, ValueError, asyncio.TimeoutError])
def test_orders_to_end_and_exceptions_pass_unchanged(error):
    with pytest.raises(error), CONTAINED:
        raise error
