"""What a peer with a valid key may send as its handshake costs a reader this peer and nothing else, over real NIXL."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import pytest
from msgspec.structs import replace

from tests.support.hostile_handshakes import FORGERIES, PIECE_LENGTH, deadly, mutated, with_metadata, with_random_key
from tests.support.kv_engines import Shape
from tests.support.kv_holders import Holder, start_holder
from tests.support.kv_readers import Reader, load_without_trial, start_reader

pytestmark = pytest.mark.skipif(find_spec("nixl") is None, reason="NIXL is not installed")

MUTATIONS = 24
KEYS = 16
SEED = "hostile-metadata"


@pytest.fixture(scope="module")
def holder() -> Iterator[Holder]:
    holder = start_holder(Shape())
    yield holder
    holder.close()


@pytest.fixture
def reader() -> Iterator[Reader]:
    reader = start_reader(Shape())
    yield reader
    reader.close()


@pytest.mark.parametrize("name", FORGERIES)
def test_a_reader_outlives_a_forged_handshake(holder, reader, name):
    forge, fault = FORGERIES[name]
    evil = replace(forge(holder.handshake), worker_id="evil")

    assert fault in reader.connect([evil])["evil"]
    assert fault in reader.connect([evil])["evil"], "the second time"
    assert reader.connect([holder.handshake]) == {"holder": ""}


def test_a_reader_outlives_mutated_metadata(holder, reader):
    """Some end a process when it loads them, others when it reads with them."""
    metadata = holder.handshake.ranks[0].agent
    hostile = [mutated(metadata, f"{SEED}-{number}") for number in range(MUTATIONS)]
    if PIECE_LENGTH in metadata:
        hostile += [with_random_key(metadata, f"{SEED}-{number}") for number in range(KEYS)]
    hostile.append(deadly(metadata))
    assert (load_without_trial(hostile[-1]) or 0) < 0

    evil = [
        replace(with_metadata(holder.handshake, one), worker_id=f"evil-{number}") for number, one in enumerate(hostile)
    ]
    failures = reader.connect(evil)

    print(f"\n{sum('ends a process' in one for one in failures.values())} of {len(failures)} end a process")
    assert "ends a process" in failures[f"evil-{len(hostile) - 1}"]
    assert reader.connect([holder.handshake]) == {"holder": ""}
