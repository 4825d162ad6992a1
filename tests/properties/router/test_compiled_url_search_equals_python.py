"""C finds the same bodies with URLs as Python."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from services.router.placement.media import ESCAPED_HINTS, HINT, may_have_urls_in_python
from services.router.tokenize.words import IS_COMPILED
from tests.support.examples import examples

pytestmark = pytest.mark.skipif(not IS_COMPILED, reason="not built here")

PIECES = st.sampled_from([HINT, *ESCAPED_HINTS, b'"', b"\\", b"u", b"rl", b"l", b"\\u00", b"6c", b"\xc3\xa9", b"x"])


@settings(deadline=None, max_examples=examples(300))
@given(st.lists(PIECES, max_size=12).map(b"".join), st.integers(0, 12), st.integers(0, 12))
@example(b"", 0, 0)
@example(HINT, 0, 0)
@example(HINT, 1, 0)
def test_bodies_with_urls_are_the_same_in_c_and_in_python(body, cut_before, cut_behind):
    from services.router.native._tokenize import may_have_urls  # may not be built

    body = body[cut_before : max(cut_before, len(body) - cut_behind)]

    assert may_have_urls(body) == may_have_urls_in_python(body)
