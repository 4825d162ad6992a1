from __future__ import annotations

import ctypes
import os
import time
from typing import Any

from tests.support.fake_nixl._bindings import nixlBackendError


def nixl_agent_config(**_fields: Any) -> None:
    return


class nixl_agent:  # noqa: N801
    def __init__(self, name: str, _config: None) -> None:
        if os.environ.get("FAKE_NIXL_BROKEN"):
            raise nixlBackendError("no plugins")

    def add_remote_agent(self, metadata: bytes) -> bytes:
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
        print("what a library says")
        return metadata

    def make_connection(self, peer: str, backends: list[str]) -> None:
        return
