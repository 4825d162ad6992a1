"""Messages survive the wire, also between processes of different versions."""

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
from tests.support.examples import examples

by_type = pytest.mark.parametrize("message_type", ALL_MESSAGES, ids=lambda one: one.__name__)


def test_every_message_is_frozen_documented_and_has_the_common_base():
    for message_type in ALL_MESSAGES:
        assert issubclass(message_type, Message | PackedMessage)
        assert message_type.__doc__, message_type
        assert message_type.__struct_config__.frozen
        kinds = {parameter.kind for parameter in inspect.signature(message_type).parameters.values()}
        assert kinds <= {inspect.Parameter.KEYWORD_ONLY}, message_type


@by_type
@settings(max_examples=examples(15))
@given(data=st.data())
def test_every_message_survives_the_wire(message_type, data):
    message = data.draw(strategy(message_type))

    assert unpack(pack(message), message_type) == message


def test_the_bytes_of_an_earlier_process_keep_their_meaning():
    for message_type in ALL_MESSAGES:
        golden = FOLDER / f"{message_type.__name__}.msgpack"
        assert golden.exists(), "a new message: run python -m tests.contracts.golden_files"
        meant = msgspec.json.decode(golden.with_suffix(".json").read_bytes(), type=message_type)
        assert unpack(golden.read_bytes(), message_type) == meant


def test_no_golden_file_is_left_of_a_message_that_is_gone():
    assert {file.stem for file in FOLDER.glob("*.msgpack")} == {one.__name__ for one in ALL_MESSAGES}


def test_fields_of_a_later_version_are_ignored():
    for message_type in ALL_MESSAGES:
        message = example(message_type)
        fields = msgspec.msgpack.decode(pack(message))
        later = [*fields, "new"] if isinstance(fields, list) else {**fields, "a_field_of_tomorrow": 1}
        assert unpack(msgspec.msgpack.encode(later), message_type) == message


def test_every_address_comes_from_its_message_and_matches_its_filter():
    for channel in CHANNELS.values():
        address = channel.address(example(channel.message))
        for pattern, text in zip(channel.filter().split("."), address.split("."), strict=True):
            assert pattern in ("*", text)
        assert "{" not in address


def test_every_channel_has_senders_receivers_and_every_ask_one_responder():
    for channel in CHANNELS.values():
        assert channel.senders
        assert channel.receivers
        if isinstance(channel, AskChannel):
            assert channel.delivery is Delivery.ASK
            assert len(channel.receivers) == 1
        assert set(channel.senders + channel.receivers) <= set(Party)


def test_every_message_that_a_worker_sends_names_it_in_the_subject():
    """Else nats-server could not refuse it to another worker."""
    assert [name for name, row in CHANNELS.items() if Party.WORKER in row.senders and not row.sender_parts] == []


def test_no_two_channels_share_a_subject():
    def overlap(one: Channel, other: Channel) -> bool:
        mine, theirs = one.filter().split("."), other.filter().split(".")
        return len(mine) == len(theirs) and all("*" in (a, b) or a == b for a, b in zip(mine, theirs, strict=True))

    for channel in CHANNELS.values():
        assert [other for other in CHANNELS.values() if overlap(channel, other)] == [channel]


def test_an_unknown_placeholder_is_refused_when_the_module_loads():
    with pytest.raises(ValueError, match="has no field nobody"):
        Channel("x.{nobody}", CHANNELS["LOAD"].message, Delivery.EVENT, (Party.WORKER,), (Party.ROUTER,))


def test_every_reason_has_one_http_status():
    assert set(HTTP_STATUS) == set(Reason)
