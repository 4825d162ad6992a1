"""Sizes as people write them."""

from __future__ import annotations

import pytest

from services.launcher.system.sizes import parse_bytes


@pytest.mark.parametrize(
    ("text", "expected"),
    [("1024", 1024), ("512M", 512 * 2**20), ("2GiB", 2**31), ("1.5 g", 3 * 2**29), ("4kb", 4096)],
)
def test_sizes_are_powers_of_1024(text: str, expected: int):
    assert parse_bytes(text) == expected


def test_what_is_not_a_size_is_refused_with_an_example():
    with pytest.raises(ValueError, match="512M"):
        parse_bytes("much")
