"""Chats are found by their beginning, and forgotten when others need the memory."""

from __future__ import annotations

import json

import msgspec
import pytest

from services.router.tokenize.known_prompts import (
    EARLIER_TRIED,
    NO_DEPENDENCIES,
    KnownPrompt,
    KnownPrompts,
    messages_behind,
    text_behind,
    without_end,
)
from services.router.tokenize.segments import Node, Place

KIND = "0-", b""
NODE = Node(1, "", 0, [], None, b"")


def chat(raw: bytes) -> KnownPrompt:
    return KnownPrompt(raw, 0, [], NO_DEPENDENCIES, Place(NODE, [], 0, ""))


def raw_of(*texts: str) -> bytes:
    return b"[%b]" % b", ".join(b'{"role": "user", "content": "%b"}' % text.encode() for text in texts)


def begun(*texts: str) -> bytes:
    return without_end(raw_of(*texts))


def remembered(*raws: bytes, bytes_max: int = 1 << 20) -> KnownPrompts:
    chats = KnownPrompts(bytes_max)
    for raw in raws:
        chats.put(KIND, chat(raw), None)
    return chats


@pytest.mark.parametrize(("whole", "begun"), [('"a "', '"a '), ('""', '"'), ("[{} \n]", "[{}"), ("[]", "["), ("", "")])
def test_the_end_of_a_text_or_an_array_is_left_out(whole, begun):
    assert without_end(msgspec.Raw(whole.encode())) == begun.encode()


def test_the_text_behind_a_known_text_is_a_text():
    known = chat(without_end(b'"one"'))

    assert text_behind(known, without_end(b'"one two"')) == b'" two"'
    assert text_behind(known, without_end(b'"one"')) == b'""'


@pytest.mark.parametrize("texts", [["a"], ["a", "b"], ["a", "b", "c", "d"]])
@pytest.mark.parametrize("space", [b"", b" \n\t"])
def test_the_messages_behind_a_known_chat_are_an_array(texts, space):
    known = chat(without_end(raw_of("a").replace(b"]", b" \n]")))
    raw = without_end(raw_of(*texts).replace(b", {", space + b", {").replace(b"]", space + b"]"))

    assert json.loads(messages_behind(known, raw)) == json.loads(raw_of(*texts[1:]))


def test_a_longer_chat_is_found_only_where_its_messages_begin_alike():
    chats = remembered(begun("a", "b"))

    for found in ("a", "b"), ("a", "b", "c"):
        assert chats.find(KIND, begun(*found)).raw == begun("a", "b")
    for other in ("a",), ("a", "bb"), ("b", "b", "c"), ():
        assert chats.find(KIND, begun(*other)) is None
    assert chats.find(("1-", b""), begun("a", "b")) is None


def test_of_branches_the_longest_is_found():
    branches = [("a",), ("a", "b"), *(("a", "b", f"b{number}") for number in range(EARLIER_TRIED - 2))]
    chats = remembered(*(begun(*texts) for texts in branches))

    for texts in branches:
        assert chats.find(KIND, begun(*texts, "z")).raw == begun(*texts)
    assert chats.find(KIND, begun("a", "b", "c")).raw == begun("a", "b")


def test_a_next_turn_takes_the_place_of_the_turn_before():
    chats = remembered(begun("a"))
    known = chats.find(KIND, begun("a", "b"))
    chats.put(KIND, chat(begun("a", "b")), known)
    chats.put(KIND, chat(begun("a", "b")), known)  # The same request again, begun at the same time.

    assert chats.find(KIND, begun("a", "c")) is None
    assert chats.find(KIND, begun("a", "b", "c"))


def test_the_chat_that_was_not_used_for_longest_is_forgotten():
    one = chat(begun("1")).size
    chats = remembered(begun("1"), begun("2"), bytes_max=2 * one)
    assert chats.find(KIND, begun("1"))
    chats.put(KIND, chat(begun("3")), None)

    assert [bool(chats.find(KIND, begun(text))) for text in "123"] == [True, False, True]


def test_a_chat_larger_than_the_memory_is_not_kept():
    chats = remembered(begun("x" * 5000), bytes_max=4000)

    assert chats.find(KIND, begun("x" * 5000)) is None
    chats.put(KIND, chat(begun("a")), None)
    assert chats.find(KIND, begun("a"))
