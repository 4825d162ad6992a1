"""Which transport UCX chose for reads, from what it prints.

NIXL does not tell. With ``UCX_PROTO_INFO`` UCX prints a table of the ways for each kind of transfer, by the size of the
transfer, when it first needs one. The way of the largest ones moves KV.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Callable

TITLE = "remote memory read by ucp_get"
LARGEST = re.compile(r"\b(?:0|\d+)\.\.inf\s*\|(?P<how>[^|]*)\|(?P<way>[^|]*)\|")
"""The row of a table for the largest transfers."""
NOT_NAMES = re.compile(r"[^\w./:%, +-]")
CHARS_MAX = 100
READ_MAX = 1 << 16
OUT = 1


def tell_transports() -> Callable[[], str]:
    """Let UCX agents that are made from now on print their tables; call what this returns for the text. Only for a
    process of which nothing else is wanted: all its standard output goes there.
    """
    os.environ["UCX_PROTO_INFO"] = "*get*"  # UCX reads it when an agent is made.
    printed = os.memfd_create("printed")
    os.dup2(printed, OUT)

    def told() -> str:
        ctypes.CDLL(None).fflush(None)
        return os.pread(printed, READ_MAX, max(0, os.fstat(printed).st_size - READ_MAX)).decode(errors="replace")

    return told


def read_transport(printed: str) -> str:
    """Transport and device of the last table of reads, such as ``cma/memory`` or ``tcp/eth0``. Empty: there is none."""
    _before, title, table = printed.rpartition(TITLE)
    found = LARGEST.search(table) if title else None
    if found is None:
        return ""
    emulated = "emulated " if "emulation" in found["how"] else ""
    return NOT_NAMES.sub("", f"{emulated}{found['way'].strip()}")[:CHARS_MAX]
