"""A plug-in of NIXL that cannot move KV between engines here is refused before an engine is loaded."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from services.worker.engines.backends import check_backend, try_backend, why_not
from services.worker.engines.port import EngineRefused

PACKAGE = next(filter(find_spec, ("nixl_cu13", "nixl_cu12")), "nixl")
pytestmark = pytest.mark.skipif(find_spec("nixl") is None, reason="NIXL is not installed")


@pytest.mark.parametrize(
    ("backend", "why"),
    [
        ("WARP", "NIXL has no plug-in of this name here. Those here are "),
        ("POSIX", "does not read memory of another agent"),
        ("GDS", "does not load: libcufile.so.0: cannot open shared object file"),
    ],
    ids=["unknown", "of files", "not loading"],
)
async def test_a_plug_in_that_cannot_move_kv_is_refused_by_name(backend: str, why: str):
    with pytest.raises(EngineRefused) as refused:
        await check_backend(PACKAGE, backend)

    assert str(refused.value).startswith(f"WORKER_KV_BACKEND={backend}: ")
    assert why in str(refused.value)
    assert "UCX" in str(refused.value)


async def test_a_plug_in_that_moves_kv_is_not():
    assert await try_backend(PACKAGE, "UCX") == ""


async def test_without_nixl_there_is_none():
    with pytest.raises(EngineRefused, match="NIXL does not load: No module named 'nixl_cu99'"):
        await check_backend("nixl_cu99", "LIBFABRIC")


def test_a_plug_in_that_ends_the_process_is_refused():
    assert "ends a process that uses it (exit status -11)" in why_not(b"", -11)
