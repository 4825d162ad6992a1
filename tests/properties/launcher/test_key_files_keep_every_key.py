"""Whatever text an operator gives `baton keys new`, the key file stays readable and keeps every other key."""

from __future__ import annotations

import tomllib
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from services.launcher.cluster.api_keys import CannotAdd, add_entry
from services.router.auth.api_keys import read_keys
from shared.contracts.api_keys import Key, digest_of
from tests.support.examples import examples

ANY_TEXT = st.text(st.characters(exclude_categories=()), max_size=40)
"""With lone surrogates, which no UTF-8 file can hold."""


@given(note=ANY_TEXT, model=ANY_TEXT, newline=st.booleans())
@example(note="on call 😀", model="m", newline=True)
@example(note="\udce4", model="m", newline=True)
@example(note='"""\\\x00\x7f\u2028\r\n[[key]]', model="'", newline=False)
@settings(max_examples=examples(60))
def test_any_text_is_refused_or_survives_with_every_other_key(note: str, model: str, newline: bool):
    with TemporaryDirectory() as folder:
        file = Path(folder) / "keys.toml"
        add_entry(file, Key(tenant="first", sha256=digest_of("1")))
        before = file.read_text().rstrip() + "\n# by hand: keep\n" * newline
        file.write_text(before)
        second = Key(tenant="second", sha256=digest_of("2"), note=note, models=frozenset({model}))
        if any(0xD800 <= ord(character) < 0xE000 for character in note + model):
            with pytest.raises(CannotAdd, match="Unicode"):
                add_entry(file, second)
            assert file.read_text() == before
            assert [one.name for one in Path(folder).iterdir()] == ["keys.toml"]
            return
        add_entry(file, second)
        keyring = read_keys(tomllib.loads(file.read_bytes().decode()))
        assert file.read_text().startswith(before.rstrip())
        assert keyring.keys[digest_of("1")].tenant == "first"
        assert (keyring.keys[digest_of("2")].note, keyring.keys[digest_of("2")].models) == (note, {model})
