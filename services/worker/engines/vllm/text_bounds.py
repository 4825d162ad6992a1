"""Bounds on what vLLM's server tokenizes and answers, whatever the path: completions, chats, messages, responses,
embeddings, pooling, scores and ``/tokenize``.

vLLM bounds a text by the longest token of the tokenizer, which may be 128 spaces, and ``/tokenize`` by nothing. A text
that is long enough makes the tokenizers library panic or keeps the only thread that tokenizes busy for minutes, and the
answer takes the event loop as long.
"""

from __future__ import annotations

from typing import Any

from transformers import TokenizersBackend
from vllm.exceptions import VLLMValidationError
from vllm.renderers.params import TokenizeParams

from shared.contracts.request_body import text_fault, tokens_answered_max
from shared.third_party import CONTAINED, LibraryFailed

CHECK_LENGTH, ENCODE_KWARGS = TokenizeParams._text_len_check, TokenizeParams.get_encode_kwargs
POST_TOKENIZATION, ENCODE_PLUS = TokenizeParams.apply_post_tokenization, TokenizersBackend._encode_plus
"""As the libraries have them, whatever was bounded before."""


def bound_texts(max_model_len: int) -> None:
    """From now on this process tokenizes no text beyond ``text_fault``, makes no more than ``tokens_answered_max``
    tokens of one, and a panic of the tokenizers library fails its request alone. Call before the first request.
    """
    tokens_max = tokens_answered_max(max_model_len)

    def checked(params: Any, tokenizer: Any, text: str) -> str:
        _check(text, max_model_len)
        return CHECK_LENGTH(params, tokenizer, text)

    def truncated(params: Any) -> dict[str, Any]:
        """The library cuts off what is beyond the maximum before a list is made of it."""
        kwargs = ENCODE_KWARGS(params)
        if kwargs.get("truncation") and (kwargs.get("max_length") or tokens_max) <= tokens_max:
            return kwargs
        return kwargs | {"truncation": True, "max_length": tokens_max + 1}

    def counted(params: Any, tokenizer: Any, prompt: Any) -> Any:
        tokens = prompt.get("prompt_token_ids")
        if tokens is not None and len(tokens) > tokens_max:
            raise VLLMValidationError(
                f"The text has more than {tokens_max} tokens. Send it in several requests.",
                parameter="input_tokens",
                value=len(tokens),
            )
        return POST_TOKENIZATION(params, tokenizer, prompt)

    def contained(tokenizer: Any, text: Any, *args: Any, **kwargs: Any) -> Any:
        for one in (text, kwargs.get("text_pair")):
            for each in one if isinstance(one, (list, tuple)) else (one,):
                if isinstance(each, str):
                    _check(each, max_model_len)
        try:
            with CONTAINED:
                return ENCODE_PLUS(tokenizer, text, *args, **kwargs)
        except LibraryFailed as failed:
            raise VLLMValidationError(f"The tokenizer cannot read this text: {failed}", parameter="input") from failed

    TokenizeParams._text_len_check = checked
    TokenizeParams.get_encode_kwargs = truncated
    TokenizeParams.apply_post_tokenization = counted
    TokenizersBackend._encode_plus = contained


def _check(text: str, max_model_len: int) -> None:
    if fault := text_fault(text, max_model_len):
        raise VLLMValidationError(f"The text {fault}.", parameter="input_text", value=len(text))
