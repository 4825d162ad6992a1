"""The page of settings: each says what it does, and when an operator changes it."""

from __future__ import annotations

import msgspec
import pytest

from scripts.make_pages import section


class Told(msgspec.Struct):
    # Times
    wait_s_max: float = 2.0
    """The longest wait of ``x``. Change it when clients are patient."""
    # Sizes
    file_bytes_max: int = 1 << 20
    """The largest file. Change it when files are larger."""
    name: str = ""
    """A name. Change it when another one is wanted."""


class Untold(msgspec.Struct):
    wait_s_max: float = 2.0
    """The longest wait."""


def test_settings_stand_by_subject_with_default_unit_and_when_to_change_them():
    assert section("T", "T_", Told).splitlines() == [
        "## T",
        "",
        "**Times**",
        "",
        "* `T_WAIT_S_MAX` (`2` seconds): The longest wait of `x`. *Change it when* clients are patient.",
        "",
        "**Sizes**",
        "",
        "* `T_FILE_BYTES_MAX` (`1048576` bytes: 1 MiB): The largest file. *Change it when* files are larger.",
        "* `T_NAME`: A name. *Change it when* another one is wanted.",
    ]


def test_a_setting_that_nobody_knows_when_to_change_is_refused():
    with pytest.raises(ValueError, match="T_WAIT_S_MAX needs a docstring"):
        section("T", "T_", Untold)
