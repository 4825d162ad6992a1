"""vLLM's source distributions, and an older CPU build with the Python files of a newer release over it.

The index has CPU builds of some releases only. Between two neighbours the compiled parts hardly change, so that an
engine of the newer one runs with those of the older. ``python -m tests.support.vllm_releases 0.33`` makes such a build in
.baton/vllm and prints the folder for ``PYTHONPATH``.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
LOCKED = re.compile(r"^vllm==((\d+\.\d+)\.\S+)", re.MULTILINE)
RELEASES = {
    release: full
    for file in sorted((ROOT / "requirements").glob("engine-cuda*.in"))
    for full, release in LOCKED.findall(file.read_text())
}
"""Supported series, and the release of each that Baton was written for."""
DOWNLOAD_S_MAX = 900.0


class NotFetched(Exception):
    """The message names the log."""


def fetch_sources(full: str, folder: Path) -> Path:
    """The unpacked source distribution of a release, in a folder of its own below ``folder``. Raises NotFetched.

    pip unpacks a source distribution to read its metadata. For vLLM that fails without its build system, after the
    files are there.
    """
    sources = folder / f"vllm-{full}"
    if sources.exists():
        return sources
    download = folder / f"vllm-{full}.download"
    shutil.rmtree(download, ignore_errors=True)
    download.mkdir(parents=True)
    log = folder / f"vllm-{full}.log"
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", "vllm", "--no-build-isolation"]
    with log.open("w") as out:
        subprocess.run(
            [*pip, "--no-clean", f"vllm=={full}"],
            cwd=download,
            env={**os.environ, "TMPDIR": str(download)},
            stdout=out,
            stderr=out,
            timeout=DOWNLOAD_S_MAX,
            check=False,
        )
    unpacked = next(download.glob("pip-*/vllm_*/vllm/_version.py"), None)
    if unpacked is None:
        raise NotFetched(f"the source distribution of vLLM {full} could not be fetched: see {log}")
    unpacked.parents[1].rename(sources)
    shutil.rmtree(download)
    return sources


def laid_over(full: str, folder: Path) -> Path:
    """A folder for ``PYTHONPATH`` that makes the installed CPU build one of another release. Raises NotFetched.

    It has that release's Python files, links to the installed compiled parts, the name under which vLLM looks for its
    version and finds its platform, and packages that the release needs and that are not here.
    """
    sources, over = fetch_sources(full, folder), folder / f"vllm-{full}-over"
    if over.exists():
        return over
    partial = over.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    shutil.copytree(sources / "vllm", partial / "vllm")
    spec = find_spec("vllm")
    assert spec is not None
    for installed in map(Path, spec.submodule_search_locations or ()):
        for compiled in installed.glob("*.so"):
            (partial / "vllm" / compiled.name).symlink_to(compiled)
    about = partial / f"vllm-{full}+cpu.dist-info" / "METADATA"
    about.parent.mkdir()
    about.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {full}+cpu\n")
    lines = (sources / "requirements" / "common.txt").read_text().splitlines()
    if missing := [name for line in lines if (name := missing_of(line))]:
        install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(partial), *missing]
        subprocess.run(install, timeout=DOWNLOAD_S_MAX, check=True)
    partial.rename(over)
    return over


def kv_cache_config_of(*args: Any) -> Any:
    """vLLM's ``get_kv_cache_config_from_groups``, of whichever release is imported."""
    try:
        from vllm.v1.core import kv_cache_planning as module
    except ImportError:  # before 0.33
        from vllm.v1.core import kv_cache_utils as module
    return module.get_kv_cache_config_from_groups(*args)


def missing_of(line: str) -> str:
    """What a line of a requirements file asks for, if no version of it is installed; else empty."""
    text = line.partition("#")[0].strip()
    if not text or text.startswith("-"):
        return ""
    wanted = Requirement(text)
    if wanted.marker is not None and not wanted.marker.evaluate():
        return ""
    try:
        version(wanted.name)
    except PackageNotFoundError:
        return f"{wanted.name}{wanted.specifier}"
    return ""


if __name__ == "__main__":
    print(laid_over(RELEASES[sys.argv[1]], ROOT / ".baton" / "vllm"))
