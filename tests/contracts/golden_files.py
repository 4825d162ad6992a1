"""Writes a golden file for each message that has none: ``python -m tests.contracts.golden_files``.

A golden file is what a process of an earlier version sends, so an existing one is never written anew: when a field is
added, the old bytes must still unpack. Beside the bytes stands their meaning as JSON.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from shared.bus.wire import pack
from tests.contracts.examples import ALL_MESSAGES, example

FOLDER = Path(__file__).parent / "golden"


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for message_type in ALL_MESSAGES:
        packed = FOLDER / f"{message_type.__name__}.msgpack"
        if not packed.exists():
            message = example(message_type)
            packed.write_bytes(pack(message))
            packed.with_suffix(".json").write_bytes(msgspec.json.format(msgspec.json.encode(message)) + b"\n")


if __name__ == "__main__":
    main()
