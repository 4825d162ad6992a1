"""How a real engine's reads are spoiled: by ``ForgingAgent`` in the engine, as a test writes into a file."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path

FORGERY_FILE = "TEST_FORGERY_FILE"
"""Variable of the engine's environment: the file that ``spoil`` writes."""
KV_TRANSFER = {
    "kv_connector": "BatonConnector",
    "kv_connector_module_path": "services.worker.engines.vllm.engine_process",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
    "kv_connector_extra_config": {"agent": "tests.engines.forging_agent:ForgingAgent"},
}
ENGINE_ARGS = f"--kv-transfer-config {shlex.quote(json.dumps(KV_TRANSFER))}"
"""Of the engine that shall use it."""


class Forgery(StrEnum):
    NONE = "none"
    SWAPPED = "swapped"
    """Two blocks of each layer have each other's KV."""
    ZEROED = "zeroed"
    """One layer of a block, or a part of a state in one layer, is zero."""
    DRAFTLESS = "draftless"
    """All that was read for the second half of the layers is zero: those of a draft model like the model itself."""


@contextmanager
def spoiled(file: Path, forgery: Forgery, group: int, groups: int) -> Iterator[None]:
    """Until the block ends, a prompt's read of this KV cache group is spoiled. An engine of so many groups reads the
    prompts of self-tests one after the other, and of each the groups in their order.
    """
    spoil(file, forgery, group, groups)
    try:
        yield
    finally:
        spoil(file)


def spoil(file: Path, forgery: Forgery = Forgery.NONE, group: int = 0, groups: int = 1) -> None:
    """See ``spoiled``; from now on."""
    new = file.with_suffix(".new")
    new.write_text(f"{forgery} {group} {groups}", encoding="utf-8")
    new.replace(file)


class Spoiling:
    """What to do with each read, as the file says."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._text = ""
        self._reads = 0
        """Since the file says so."""

    def next(self) -> Forgery:
        """For the read that begins."""
        text = self._file.read_text(encoding="utf-8")
        if text != self._text:
            self._text, self._reads = text, 0
        forgery, group, groups = text.split()
        number, self._reads = self._reads % int(groups), self._reads + 1
        return Forgery(forgery) if number == int(group) else Forgery.NONE
