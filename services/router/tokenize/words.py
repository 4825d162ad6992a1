"""Cuts texts into words, in C where that is built: ``native/words.c`` is several times as fast as ``PythonWords``."""

from __future__ import annotations

from shared.text_cuts import PythonWords, Words

try:
    from services.router.native._tokenize import NativeWords
except ImportError:
    IS_COMPILED = False
else:
    IS_COMPILED = True


def words_between(behind: str, before: str, drops_space: bool, tokens: tuple[str, ...], ends: str) -> Words:
    """See ``PythonWords``."""
    return (NativeWords if IS_COMPILED else PythonWords)(behind, before, drops_space, tokens, ends)
