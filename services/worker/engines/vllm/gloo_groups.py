"""Process groups of Gloo, as a CPU engine with one rank needs them.

vLLM makes 15 groups for an engine. Gloo gives each a thread for its sockets, which looks for events a hundred times a
second, also where a rank has no peer. Together they took 1.6 % of a core of an idle engine (one takes 0.1 %), and
interrupted the threads of the model.
"""

from __future__ import annotations

import os
from datetime import timedelta
from functools import cache
from typing import Any

from torch.distributed import ProcessGroupGloo, Store, distributed_c10d


@cache
def device() -> Any:
    """The thread, and the network interface on which Gloo listens."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    make = ProcessGroupGloo.create_device
    return make(interface=interface) if interface else ProcessGroupGloo.create_default_device()


class OneLoopGloo(ProcessGroupGloo):
    """A group that shares its thread with all others of this process."""

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        options = ProcessGroupGloo._Options()
        options._timeout = timeout
        options._devices = [device()]
        super().__init__(store, rank, size, options)


def share_loop() -> None:
    """From now on torch makes such groups in this process."""
    distributed_c10d.ProcessGroupGloo = OneLoopGloo
