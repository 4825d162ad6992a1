"""The wire keeps its promises: to itself, and to processes of an earlier version."""

from __future__ import annotations

import inspect

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.bus.wire import pack, unpack
from shared.contracts.channels import CHANNELS, AskChannel, Channel, Delivery, Party
from shared.contracts.failures import HTTP_STATUS, Reason
from shared.contracts.message import Message, PackedMessage
from tests.contracts.examples import ALL_MESSAGES, example, strategy
from tests.contracts.golden_files import FOLDER

by_type = pytest.mark.parametrize("message_type", ALL_MESSAGES, ids=lambda one: one.__name__)
by_channel = pytest.mark.parametrize("channel", CHANNELS.values(), ids=CHANNELS.keys())


@by_type
def test_every_message_is_frozen_and_takes_keywords_only(message_type):
    assert message_type.__struct_config__.frozen
    kinds = {parameter.kind for parameter in inspect.signature(message_type).parameters.values()}
    assert kinds <= {inspect.Parameter.KEYWORD_ONLY}


@by_type
def test_every_message_has_the_common_base_and_says_who_speaks_to_whom(message_type):
    assert issubclass(message_type, Message | PackedMessage)
    assert message_type.__doc__


@by_type
@settings(max_examples=30)
@given(data=st.data())
def test_every_message_survives_the_wire(message_type, data):
    message = data.draw(strategy(message_type))

    assert unpack(pack(message), message_type) == message


@by_type
def test_what_an_earlier_version_sent_still_means_the_same(message_type):
    golden = FOLDER / f"{message_type.__name__}.msgpack"
    assert golden.exists(), "a new message: run python -m tests.contracts.golden_files"

    meant = msgspec.json.decode(golden.with_suffix(".json").read_bytes(), type=message_type)
    assert unpack(golden.read_bytes(), message_type) == meant


def test_no_golden_file_is_left_of_a_message_that_is_gone():
    assert {file.stem for file in FOLDER.glob("*.msgpack")} == {one.__name__ for one in ALL_MESSAGES}


@by_type
def test_a_message_with_fields_of_a_later_version_is_still_read(message_type):
    message = example(message_type)
    fields = msgspec.msgpack.decode(pack(message))
    later = [*fields, "new"] if isinstance(fields, list) else {**fields, "a_field_of_tomorrow": 1}

    assert unpack(msgspec.msgpack.encode(later), message_type) == message


@by_channel
def test_every_channels_address_comes_from_its_message_and_matches_its_filter(channel):
    address = channel.address(example(channel.message))

    for pattern, text in zip(channel.filter().split("."), address.split("."), strict=True):
        assert pattern in ("*", text)
    assert "{" not in address


@by_channel
def test_every_channel_names_its_ends_and_asks_have_one_answerer(channel):
    assert channel.senders
    assert channel.receivers
    if isinstance(channel, AskChannel):
        assert channel.delivery is Delivery.ASK
        assert len(channel.receivers) == 1
    assert set(channel.senders + channel.receivers) <= set(Party)


@by_channel
def test_no_two_channels_share_a_subject(channel):
    def overlap(one: Channel, other: Channel) -> bool:
        mine, theirs = one.filter().split("."), other.filter().split(".")
        return len(mine) == len(theirs) and all("*" in (a, b) or a == b for a, b in zip(mine, theirs, strict=True))

    assert [other for other in CHANNELS.values() if overlap(channel, other)] == [channel]


def test_an_unknown_placeholder_is_refused_when_the_module_loads():
    with pytest.raises(ValueError, match="has no field nobody"):
        Channel("x.{nobody}", CHANNELS["LOAD"].message, Delivery.EVENT, (Party.WORKER,), (Party.ROUTER,))


def test_every_reason_has_one_http_answer():
    assert set(HTTP_STATUS) == set(Reason)
