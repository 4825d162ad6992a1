"""Bounds the text that vLLM's server renders from one chat.

vLLM checks the length of a prompt after its template has been rendered, and its time limit abandons the thread that
renders, which goes on. A variable that a template repeats for each message becomes gigabytes before either helps.
"""

from __future__ import annotations

from functools import partial

from jinja2.sandbox import ImmutableSandboxedEnvironment

from shared.contracts.request_body import joined, prompt_chars_max


def bound_rendering(max_model_len: int) -> None:
    """From now on no template of this process makes more than ``prompt_chars_max``. Call before the first request.

    ``concat`` is how an environment of jinja2 joins the pieces of a template or macro (its ``NativeEnvironment``
    replaces it, too). Transformers makes the environments itself, so it is set for their class.
    """
    bounded = partial(joined, chars_max=prompt_chars_max(max_model_len))
    ImmutableSandboxedEnvironment.concat = staticmethod(bounded)
