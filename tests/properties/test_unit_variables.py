"""Variables in the files of systemd units mean what they say."""

from __future__ import annotations

import shlex

from hypothesis import given, settings
from hypothesis import strategies as st

from services.launcher.service_files.files import quoted_variables
from tests.support.examples import examples
from tests.support.unit_manager import read_variables

NAMES = st.from_regex(r"[A-Z_]{1,9}", fullmatch=True)
VALUES = st.text(st.characters(codec="ascii", categories=["L", "N", "P", "S", "Zs"]))


@settings(max_examples=examples(50))
@given(st.dictionaries(NAMES, VALUES))
def test_variables_read_back_and_mean_the_same_in_a_shells_quotes(variables: dict[str, str]):
    """systemd.exec(5): double quotes of an EnvironmentFile follow the rules of a shell, without expansion."""
    text = quoted_variables(variables)

    assert read_variables(text) == variables
    for line in text.splitlines():
        name, _, value = line.partition("=")
        assert shlex.split(value.replace("\\$", "$").replace("\\`", "`")) == [variables[name]]
