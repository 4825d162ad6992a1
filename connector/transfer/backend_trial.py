"""``python -m connector.transfer.backend_trial PACKAGE BACKEND`` tries a plug-in of NIXL: two agents of this process,
of which one reads from the other. Prints a ``BackendTried`` as JSON.

It runs in a process of its own, because a plug-in may load much, or crash. ``PACKAGE``: see ``trial``.
"""

from __future__ import annotations

import ctypes
import os
import sys
from types import ModuleType

import msgspec
import numpy as np

from connector.transfer.agent import Region, TransferFailed, failing
from connector.transfer.trial import TrialRank, import_nixl, load_and_read

BYTES = 64


class BackendTried(msgspec.Struct, frozen=True):
    plugins: list[str]
    """All that NIXL finds, whether or not they load."""
    failure: str = ""
    """Why the plug-in cannot move KV between engines."""


def main() -> None:
    package, backend = sys.argv[1:]
    out = os.dup(1)
    os.dup2(2, 1)  # Libraries print.
    try:
        nixl = import_nixl(package)
        plugins = nixl.plugins()
    except Exception as error:
        tried = BackendTried([], f"NIXL does not load: {error}")
    else:
        tried = BackendTried(plugins, failure_of(nixl, backend, plugins))
    os.write(out, msgspec.json.encode(tried))
    os._exit(0)  # What a plug-in does at the end of a process is of no interest.


def failure_of(nixl: ModuleType, backend: str, plugins: list[str]) -> str:
    if backend not in plugins:
        return "NIXL has no plug-in of this name here"
    if why := why_not_loaded(nixl, backend):
        return f"NIXL's plug-in of this name does not load: {why}"
    try:
        with failing("trying it"):
            read_own(nixl, backend)
    except TransferFailed as failed:
        return f"NIXL's plug-in of this name does not read memory of another agent ({failed})"
    return ""


def why_not_loaded(nixl: ModuleType, backend: str) -> str:
    """NIXL says only that it has not found the plug-in when a library is missing that this needs."""
    file = nixl.plugin_folder() / f"libplugin_{backend}.so"
    try:
        ctypes.CDLL(str(file))
    except OSError as error:
        return str(error) if file.exists() else ""
    return ""


def read_own(nixl: ModuleType, backend: str) -> None:
    """As engines do. Raises what nixl raises."""
    memory = np.zeros(BYTES, dtype=np.uint8)
    holder = nixl.make_agent("holder", progress=True, backend=backend)
    registered = nixl.register(holder, [Region(memory.ctypes.data, BYTES, "cpu", 0)], backend)
    rank = TrialRank(bytes(holder.get_agent_metadata()), [(memory.ctypes.data, BYTES, 0)])
    load_and_read(nixl, backend, nixl.make_agent("reader", progress=False, backend=backend), rank)
    nixl.deregister(holder, registered)


if __name__ == "__main__":
    main()
