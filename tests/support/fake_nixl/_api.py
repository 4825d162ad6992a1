from __future__ import annotations

import ctypes
import os
import signal
import time
from pathlib import Path
from typing import Any

from tests.support.fake_nixl._bindings import nixlBackendError


def _never_reap(*_of: int) -> None:
    time.sleep(3600)


if os.environ.get("FAKE_NIXL_UNREAPED"):
    os.waitpid = _never_reap  # type: ignore[assignment]


def nixl_agent_config(**_fields: Any) -> None:
    return


class nixl_agent:  # noqa: N801
    def __init__(self, name: str, _config: None) -> None:
        if os.environ.get("FAKE_NIXL_BROKEN"):
            raise nixlBackendError("no plugins")

    def add_remote_agent(self, metadata: bytes) -> bytes:
        if log := os.environ.get("FAKE_NIXL_LOG"):
            with Path(log).open("ab") as loaded:
                loaded.write(metadata + b"\n")
        match metadata:
            case b"segfault":
                ctypes.string_at(0)
            case b"spin":
                while True:
                    pass
            case b"hang":
                time.sleep(3600)
            case b"memory":
                return bytes(1 << 32)
            case b"exit":
                os._exit(1)
            case b"mismatch":
                raise nixlBackendError("NIXL_ERR_MISMATCH")
            case b"late" | b"out of memory":
                os.kill(os.getpid(), signal.SIGALRM if metadata == b"late" else signal.SIGKILL)
            case b"orphan":
                os.kill(os.getppid(), signal.SIGKILL)
                time.sleep(3600)
        print("what a library says")
        return metadata

    def make_connection(self, peer: str, backends: list[str]) -> None:
        return

    def register_memory(self, rows: list, **_fields: Any) -> list:
        return rows

    def deregister_memory(self, _rows: list) -> None:
        return

    def get_xfer_descs(self, spans: Any, _memory: str) -> Any:
        return spans

    def initialize_xfer(self, _operation: str, _local: Any, _remote: Any, peer: str, **_fields: Any) -> str:
        if peer == "elsewhere":
            raise nixlBackendError("NIXL_ERR_NOT_FOUND")
        return peer

    def transfer(self, handle: str) -> None:
        if handle == "read-segfault":
            ctypes.string_at(0)
        if handle == "away":
            raise nixlBackendError("NIXL_ERR_REMOTE_DISCONNECT")

    def check_xfer_state(self, _handle: str) -> str:
        return "DONE"

    def release_xfer_handle(self, _handle: str) -> None:
        return
