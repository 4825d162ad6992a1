"""Which transport UCX chose is read from what it prints."""

from __future__ import annotations

import pytest

from connector.transfer.transports import CHARS_MAX, read_transport

BEGIN = "[1796062929.936250] [vm:12576:0]   "


def table(title: str, *rows: str) -> str:
    """As UCX of nixl 1.5.1 prints it."""
    line = "+--------+-------------+-------------------------------------------+"
    lines = [line, "| b intra-node cfg#1                                               |", f"| {title} |", line]
    return "".join(f"{BEGIN}{one}\n" for one in [*lines, "| Range  | Description | Config |", line, *rows, line])


READ = "remote memory read by ucp_get*(multi) into host memory from host"
WRITE = "remote memory write by ucp_put* from host memory to host"


@pytest.mark.parametrize(
    ("rows", "transport"),
    [
        (["| 0..inf | zero-copy   | cma/memory                                |"], "cma/memory"),
        (["|      0..8184 | short | tcp/lo |", "| 8185..inf | zero-copy | 50% on rc_mlx5/mlx5_0:1 |"],
         "50% on rc_mlx5/mlx5_0:1"),
        (["| 0..inf | software emulation | tcp/eth0 |"], "emulated tcp/eth0"),
        (["| 0..inf | zero-copy | \x1b[31mtcp/`evil`$(x) |"], "31mtcp/evilx"),
        ([f"| 0..inf | zero-copy | {'a' * 300} |"], "a" * CHARS_MAX),
        (["| 0..4096 | zero-copy | cma/memory |"], ""),
    ],
    ids=["one row", "the largest", "emulated", "strange", "long", "no largest"],
)  # fmt: skip
def test_it_is_that_of_the_largest_reads(rows: list[str], transport: str):
    others = table(WRITE, "| 0..inf | zero-copy | posix/memory |")

    assert read_transport(others + table(READ, *rows)) == transport


def test_of_several_tables_the_last_one_counts():
    """An agent that reaches itself comes first."""
    own, peers = (table(READ, f"| 0..inf | zero-copy | {way} |") for way in ("self/memory", "tcp/eth0"))

    assert read_transport(own + peers) == "tcp/eth0"


@pytest.mark.parametrize("printed", ["", "what a library says\n", table(WRITE, "| 0..inf | zero-copy | cma/memory |")])
def test_without_a_table_of_reads_it_is_unknown(printed: str):
    assert read_transport(printed) == ""
