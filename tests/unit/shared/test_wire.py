"""Parts and bytes."""

from __future__ import annotations

import contextlib
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.bus.wire import INCOMPLETE_MAX, PART_AGE_S_MAX, Assembler, BadMessage, pack, split, unpack
from shared.contracts.inference import StartLeg
from tests.support.builders import start_leg

MIB = 1024 * 1024


def assembler(**fields) -> Assembler:
    return Assembler(**{"message_bytes_max": 10 * MIB, "held_bytes_max": 20 * MIB, **fields})


def parts_of(payload: bytes, message_id: str = "m", part_bytes_max: int = 10) -> list[tuple[str, bytes]]:
    return [(header, bytes(part)) for header, part in split(payload, part_bytes_max, message_id)]


@given(st.binary(min_size=1, max_size=500), st.integers(min_value=1, max_value=100))
def test_parts_put_together_are_the_payload(payload, part_bytes_max):
    whole = assembler()

    *early, last = [whole.add("s", header, part, 0.0) for header, part in parts_of(payload, "m", part_bytes_max)]

    assert last == payload
    assert not any(early)


@given(st.lists(st.binary(min_size=1, max_size=200), min_size=1, max_size=8), st.randoms())
def test_parts_of_many_messages_may_interleave(payloads, rng):
    streams = [parts_of(payload, f"m{i}") for i, payload in enumerate(payloads)]
    whole = assembler()
    built = []

    while any(streams):
        stream = rng.choice([stream for stream in streams if stream])
        built.append(whole.add("s", *stream.pop(0), 0.0))

    assert sorted(payload for payload in built if payload is not None) == sorted(payloads)
    assert whole.lost == 0


def test_a_missing_part_loses_that_message_once_and_no_other():
    whole = assembler()
    parts = parts_of(b"x" * 50)
    del parts[2]

    assert [whole.add("s", header, part, 0.0) for header, part in parts] == [None] * 4
    assert whole.lost == 1
    assert whole.add("s", "other/0/1", b"y", 0.0) == b"y"


def test_a_message_that_began_in_the_middle_is_ignored():
    whole = assembler()

    assert whole.add("s", "m/3/4", b"x", 0.0) is None
    assert whole.lost == 0


def test_a_half_built_message_is_dropped_after_its_deadline():
    whole = assembler()
    whole.add("s", "old/0/2", b"x", 0.0)

    whole.add("s", "new/0/2", b"x", PART_AGE_S_MAX + 1)

    assert whole.lost == 1
    assert whole.add("s", "old/1/2", b"x", PART_AGE_S_MAX + 1) is None
    assert whole.add("s", "new/1/2", b"y", PART_AGE_S_MAX + 1) == b"xy"


def test_half_built_messages_hold_a_bounded_number_of_bytes():
    whole = assembler(message_bytes_max=100, held_bytes_max=150)
    for name in ("a", "b", "c"):
        whole.add("s", f"{name}/0/2", b"x" * 60, 0.0)

    assert whole.lost == 1
    assert whole.add("s", "a/1/2", b"x", 0.0) is None
    assert whole.add("s", "c/1/2", b"y", 0.0) is not None


def test_half_built_messages_are_bounded_in_number():
    whole = assembler()

    for number in range(INCOMPLETE_MAX + 10):
        whole.add("s", f"m{number}/0/2", b"", 0.0)

    assert whole.lost == 10


@pytest.mark.parametrize("part_bytes", [1, MIB], ids=["in number", "in bytes"])
def test_a_sender_of_many_half_messages_pushes_out_only_its_own(part_bytes):
    whole = assembler()
    payload = b"x" * 50
    first, *others = parts_of(payload)
    whole.add("victim", *first, 0.0)

    for number in range(3 * INCOMPLETE_MAX):
        whole.add("attacker", f"m{number}/0/2", bytes(part_bytes), 0.0)

    assert [whole.add("victim", header, part, 0.0) for header, part in others][-1] == payload


def test_a_message_that_grows_beyond_the_budget_is_dropped():
    whole = assembler(message_bytes_max=100)
    whole.add("s", "m/0/3", b"x" * 60, 0.0)

    whole.add("s", "m/1/3", b"x" * 60, 0.0)

    assert whole.lost == 1
    assert whole.add("s", "m/2/3", b"x", 0.0) is None


@pytest.mark.parametrize("header", ["", "m", "m/1", "m/x/2", "m/2/2", "m/-1/2", "/0/1", "m/0/1/2", "m/0/0"])
def test_a_part_header_that_makes_no_sense_is_a_bad_message(header):
    with pytest.raises(BadMessage):
        assembler().add("s", header, b"x", 0.0)


@given(st.binary(max_size=300))
def test_any_bytes_are_a_message_or_a_bad_message(payload):
    with contextlib.suppress(BadMessage):
        unpack(payload, StartLeg)


def test_a_message_with_flipped_bytes_never_does_worse_than_bad_message():
    rng = random.Random(7)
    packed = pack(start_leg(body=b"prompt"))

    for _ in range(2000):
        broken = bytearray(packed)
        broken[rng.randrange(len(broken))] = rng.randrange(256)
        with contextlib.suppress(BadMessage):
            unpack(bytes(broken), StartLeg)
