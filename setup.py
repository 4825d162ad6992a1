"""Compiles the router's request path with mypyc, which pyproject.toml cannot say. Everything else is in pyproject.toml.

``BATON_COMPILED=0`` leaves it out, and so does a machine without a compiler or without mypy. With ``_BATON_PURE`` (see
scripts/make_wheel.py) nothing is compiled, and the wheel is for every machine.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import runpy
import shutil
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from setuptools import Distribution, Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
NAMESPACE = ROOT / "baton_serve"
"""Where a distribution has the packages, see scripts/build_backend.py; a checkout has them in its root."""
IS_CHECKOUT = not NAMESPACE.is_dir()
PACKAGES = ROOT if IS_CHECKOUT else NAMESPACE
compiled = runpy.run_path(str(PACKAGES / "shared" / "compiled.py"))


class PureDistribution(Distribution):
    """Without what pyproject.toml would have compiled."""

    def parse_config_files(self, *arguments: Any, **named: Any) -> None:
        super().parse_config_files(*arguments, **named)
        self.ext_modules = []


class BuildRequestPath(build_ext):
    """Also what mypyc makes: only when something is built, because mypyc takes half a minute."""

    def run(self) -> None:
        if not is_wanted():
            super().run()
            return
        if IS_CHECKOUT:
            self.stamp().unlink(missing_ok=True)
            for outdated in earlier_builds():
                outdated.unlink()
        self.distribution.ext_modules = [*self.extensions, *in_a_process_that_ends(translated)]
        self.swig_opts = None  # The only option that cannot be finalized twice.
        self.finalize_options()
        super().run()
        if all(Path(self.get_ext_fullpath(each.name)).exists() for each in self.extensions):
            self.stamp().write_text(compiled["digest"](PACKAGES))

    def stamp(self) -> Path:
        return (ROOT if IS_CHECKOUT else Path(self.build_lib, NAMESPACE.name)) / compiled["STAMP"]

    def build_extensions(self) -> None:
        """Compile the C files of an extension on all cores."""
        compiler: Any = self.compiler
        compile_files = compiler.compile

        def compile_side_by_side(sources: list[str], *others: Any, **named: Any) -> list[str]:
            with ThreadPoolExecutor(os.cpu_count()) as threads:
                each = threads.map(lambda source: compile_files([source], *others, **named), sources)
            return [compiled_file for files in each for compiled_file in files]

        compiler.compile = compile_side_by_side
        super().build_extensions()


def earlier_builds() -> list[Path]:
    """What mypyc made of modules in this checkout; some may not be compiled any more."""
    built = [file for package in ("shared", "services") for file in (ROOT / package).rglob("*.so")]
    return [file for file in built if file.with_name(f"{file.name.partition('.')[0]}.py").exists()]


def is_wanted() -> bool:
    has_compiler = shutil.which(os.environ.get("CC", "cc").split()[0]) is not None
    # mypyc reads types of other packages. An isolated build has neither.
    has_packages = all(find_spec(name) is not None for name in ("mypyc", "msgspec", "httptools", "nats"))
    return os.environ.get("BATON_COMPILED", "").lower() not in compiled["NO"] and has_compiler and has_packages


def in_a_process_that_ends(translate: Callable[[], list[Extension]]) -> list[Extension]:
    """Mypy leaves five million objects, and Python would free them one by one when the build ends: a quarter of a
    minute. A forked process leaves them to the kernel, before the C compiler needs memory.
    """
    made, making = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=lambda: making.send(translate()))
    process.start()
    making.close()
    try:
        extensions: list[Extension] = made.recv()
    except EOFError:  # It has said why.
        process.join()
        sys.exit(process.exitcode or 1)
    process.join()
    return extensions


def translated() -> list[Extension]:
    """The modules as C, to be compiled into one library that all of them load. Type errors end the build."""
    from mypyc.build import mypycify

    gc.disable()  # Almost everything lives until the process ends.
    os.chdir(ROOT)
    paths = [str(compiled["source"](module, PACKAGES).relative_to(ROOT)) for module in compiled["MODULES"]]
    folder = ROOT / "build" / "request_path"
    group = (PACKAGES / compiled["GROUP"]).relative_to(ROOT)
    made = mypycify(
        paths, group_name=".".join(group.parts), multi_file=True, target_dir=str(folder), opt_level="2", debug_level="0"
    )
    for extension in made:
        extension.optional = True
        # Hidden names are called directly, not by way of the dynamic linker's table.
        extension.extra_compile_args = [*extension.extra_compile_args, "-fvisibility=hidden"]
        # mypyc 2.4 puts the headers of a group with a dot in its name into a folder, and looks for them outside.
        extension.include_dirs.append(str(folder / group.parent))
    return made


setup(
    cmdclass={"build_ext": BuildRequestPath},
    distclass=PureDistribution if os.environ.get("_BATON_PURE") else Distribution,
)
