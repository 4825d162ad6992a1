"""Uses what mypyc compiled of the request path, if it was compiled from the sources that are here.

``setup.py`` compiles ``MODULES`` and puts an extension module beside each of them, which Python prefers to the source
whatever the source says by then. So the first import of ``shared`` compares a digest, and has Python import the sources
where it differs: after an edit, without a compiler, with ``BATON_COMPILED=0``. Both forms do the same; the compiled one
takes half of the CPU. See ``docs/benchmarks/router.md``.

Imports nothing of Baton: ``setup.py`` runs this file alone.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Sequence
from importlib.machinery import EXTENSION_SUFFIXES, ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent
"""The folder of the packages: the checkout, or the package that an installation has them in."""
PREFIX = __name__.rpartition("shared.")[0]
"""What the names of modules begin with: nothing in a checkout, ``baton_serve.`` in an installation."""
STAMP = "shared/compiled.sha256"
"""The digest of the sources that were compiled; written after everything else."""
GROUP = "shared/request_path"
"""All modules are compiled into one library, named so: calls between them are calls in C."""
MODULES = tuple(
    f"{folder}/{name}"
    for folder, names in {
        "shared": "text_cuts third_party",
        "shared/contracts": "request_body",
        "shared/engine_speed": "unit_costs",
        "shared/bus": "frame_sender leg_inbox nats_bus nats_client nats_reader nats_subscription receiver wire",
        "shared/http": "limits origin plain_requests protocol",
        "shared/runtime": "random_ids",
        "shared/telemetry": "prometheus",
        "services/router": "usage",
        "services/router/admission": "admission admission_queue bus_health fair_share pacing placing queue_metrics"
        " queues waker",
        "services/router/auth": "authenticator",
        "services/router/batches": "line_server",
        "services/router/decisions": "decision decision_service odds",
        "services/router/feeds": "default_mode fleet kv reservations",
        "services/router/http": "edge",
        "services/router/placement": "assembly candidates fleet kv_sources placer policy specification",
        "services/router/relay": "accounting answer_leg attempt charging deadline_monitor migration prefill_leg relay"
        " request_tasks retry running_leg start_leg stream_answer suspects whole_answer write_coalescer",
        "services/router/request": "client context errors fields head http_request mode model_name rate_limit sequences"
        " timings trace",
        "services/router/responses": "inner_request",
        "services/router/state": "cluster_view fleet_table prefix_index reservations worker_speeds worker_view",
        "services/router/telemetry": "outcome request_log request_metrics tracing ttft",
        "services/router/tokenize": "block_hash parity prompts segments tokenizer words",
    }.items()
    for name in names.split()
)
"""What a request passes on its way through the router, and what sends a worker's frames: paths below ``ROOT``.

mypyc compiles classes to structs of C, so these modules define none that a metaclass makes (msgspec's), none that a
class in Python extends unless it says so, and no generators that ``contextlib`` wraps. None awaits in a ``finally``:
what mypyc 2.4.1 makes of it raises the exception of an earlier call again. The types of annotations hold at run time: a
function of ``float`` makes a float of an int.
"""
PACKAGES = (f"{PREFIX}shared.", f"{PREFIX}services.")
NO = ("0", "false")
"""Values of BATON_COMPILED; see ``shared.runtime.settings.CommonSettings``."""
IN_USE = False
"""Whether this process imports the compiled modules."""


def source(module: str, root: Path = ROOT) -> Path:
    return root / f"{module}.py"


def extension(module: str, root: Path = ROOT) -> Path:
    """Where this Python looks for the compiled module."""
    return root / f"{module}{EXTENSION_SUFFIXES[0]}"


def digest(root: Path = ROOT) -> str:
    """SHA-256 of the names and sources of all modules, in hex."""
    whole = hashlib.sha256()
    for module in MODULES:
        text = source(module, root).read_bytes()
        whole.update(f"{module} {len(text)}\n".encode())
        whole.update(text)
    return whole.hexdigest()


def is_current(root: Path = ROOT) -> bool:
    """Whether all modules are there, compiled for this Python from the sources that are there."""
    try:
        stamp = (root / STAMP).read_text()
    except OSError:
        return False
    built = (extension(f"{GROUP}__mypyc", root), extension(MODULES[-1], root))
    return all(file.exists() for file in built) and stamp == digest(root)


class SourceImporter:
    """Finds sources before Python's own importer finds what was compiled of them, now or of an earlier version."""

    def find_spec(
        self, name: str, _path: Sequence[str] | None = None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """See ``importlib.abc.MetaPathFinder``."""
        file = source(name.removeprefix(PREFIX).replace(".", "/"))
        return spec_from_file_location(name, file) if name.startswith(PACKAGES) and file.is_file() else None


def choose() -> None:
    """Decide what the imports of this process get. Called once, by the first import of ``shared``."""
    global IN_USE
    IN_USE = os.environ.get("BATON_COMPILED", "").lower() not in NO and is_current()
    if not IN_USE:
        sys.meta_path.insert(0, SourceImporter())
