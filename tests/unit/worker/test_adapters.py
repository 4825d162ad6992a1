"""Which files an adapter may consist of, and what its digest says."""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path

import pytest

from services.worker.engines.adapters import (
    CONFIG,
    WEIGHTS,
    AdapterFiles,
    AdapterRefused,
    LoadedAdapters,
    copy_adapter,
    folder_within,
    load_at_start,
    parse_adapters,
)
from services.worker.engines.port import EngineRefused
from shared.contracts.workers import ADAPTERS_MAX


def write(folder: Path, weights: bytes = b"weights", config: bytes = b"{}", name: str = WEIGHTS[0]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).write_bytes(config)
    (folder / name).write_bytes(weights)
    return folder


@pytest.fixture
def copies(tmp_path) -> Path:
    folder = tmp_path / "copies"
    folder.mkdir()
    return folder


class Backend:
    """An engine that refuses the adapters of ``refuses``."""

    def __init__(self, *refuses: str) -> None:
        self.refuses = refuses
        self.serves: dict[str, AdapterFiles] = {}

    async def enter(self, name: str, files: AdapterFiles) -> str:
        if name in self.refuses:
            shutil.rmtree(files.folder)
            raise AdapterRefused("its rank is too large")
        self.serves[name] = files
        return f"sha256:{files.digest}"

    async def leave(self, name: str) -> None:
        shutil.rmtree(self.serves.pop(name).folder)


def test_the_digest_is_of_the_contents_not_of_the_place(tmp_path, copies):
    def digest(folder: str, **files: bytes | str) -> str:
        return copy_adapter(write(tmp_path / folder, **files), copies).digest

    first = digest("a")
    assert digest("elsewhere/b") == first
    others = [
        digest("c", weights=b"weights2"),
        digest("d", config=b"{ }"),
        digest("e", name=WEIGHTS[1]),
        digest("f", weights=b"x" * (1 << 20) + b"y"),
        digest("g", weights=b"x" * (1 << 20) + b"z"),
        digest("h", config=b"{}weights", weights=b""),
    ]
    assert len({first, *others}) == 7


def test_the_copy_does_not_change_with_the_files(tmp_path, copies):
    source = write(tmp_path / "a")
    made = copy_adapter(source, copies)
    write(source, weights=b"later")

    assert (made.folder / WEIGHTS[0]).read_bytes() == b"weights"
    assert copy_adapter(source, copies).digest != made.digest


def test_a_folder_without_an_adapter_is_refused_and_leaves_nothing(tmp_path, copies):
    (tmp_path / "empty").mkdir()
    write(tmp_path / "half")
    (tmp_path / "half" / WEIGHTS[0]).unlink()

    for name, file in (("empty", CONFIG), ("half", WEIGHTS[0]), ("missing", CONFIG)):
        with pytest.raises(AdapterRefused, match=f"cannot be read as an adapter: {file}: No such file"):
            copy_adapter(tmp_path / name, copies)
    assert not list(copies.iterdir())


def test_files_that_would_be_waited_for_or_are_too_large_are_refused(tmp_path, copies):
    pipe = write(tmp_path / "pipe")
    (pipe / WEIGHTS[0]).unlink()
    os.mkfifo(pipe / WEIGHTS[0])
    with pytest.raises(AdapterRefused, match="no regular file"):
        copy_adapter(pipe, copies)

    with pytest.raises(AdapterRefused, match="more than 6 bytes"):
        copy_adapter(write(tmp_path / "large"), copies, bytes_max=6)
    assert not list(copies.iterdir())


@pytest.mark.parametrize("path", ["../secret", "/etc", "link", "sql/../../secret", "sql/adapter_config.json", "a\0b"])
def test_an_order_reads_nothing_outside_of_the_folder(tmp_path, path):
    write(tmp_path / "secret")
    write(tmp_path / "loras" / "sql")
    (tmp_path / "loras" / "link").symlink_to(tmp_path / "secret")

    with pytest.raises(AdapterRefused):
        folder_within(str(tmp_path / "loras"), path)


def test_a_path_is_relative_to_the_folder_or_lies_in_it(tmp_path):
    folder = write(tmp_path / "loras" / "sql")

    assert folder_within(str(tmp_path / "loras"), "sql") == folder
    assert folder_within(str(tmp_path / "loras"), str(folder)) == folder
    with pytest.raises(AdapterRefused, match="WORKER_LORA_DIR"):
        folder_within("", "sql")


def test_links_inside_an_adapter_stay_in_the_folder(tmp_path, copies):
    loras = tmp_path / "loras"
    adapter = write(loras / "sql")
    (loras / "blob").write_bytes(b"weights")
    (tmp_path / "secret").write_bytes(b"secret")
    (adapter / WEIGHTS[0]).unlink()
    (adapter / WEIGHTS[0]).symlink_to(loras / "blob")
    assert copy_adapter(adapter, copies, loras).digest

    (adapter / WEIGHTS[0]).unlink()
    (adapter / WEIGHTS[0]).symlink_to(tmp_path / "secret")
    with pytest.raises(AdapterRefused, match="outside"):
        copy_adapter(adapter, copies, loras)


def test_loading_replaces_and_repeats_without_leaving_copies(tmp_path, copies):
    async def scenario() -> None:
        backend = Backend()
        adapters = LoadedAdapters(backend, ["m"], copies)
        first = await adapters.load("sql", write(tmp_path / "a"))
        assert await adapters.load("sql", write(tmp_path / "b")) == first
        assert len(list(copies.iterdir())) == 1

        second = await adapters.load("sql", write(tmp_path / "c", weights=b"new"))
        assert (second.digest != first.digest, adapters.loaded) == (True, [second])

        await adapters.unload("sql")
        assert adapters.loaded == []
        with pytest.raises(AdapterRefused, match="no adapter"):
            await adapters.unload("sql")

    asyncio.run(scenario())


@pytest.mark.parametrize("name", ["", "m", "a b", "-x", "x" * 129, "a\n", "ä"])
def test_names_that_would_confuse_are_refused(tmp_path, copies, name):
    adapters = LoadedAdapters(Backend(), ["m"], copies)

    with pytest.raises(AdapterRefused):
        asyncio.run(adapters.load(name, write(tmp_path / "a")))


def test_no_more_adapters_than_a_record_carries(tmp_path, copies):
    async def scenario() -> None:
        adapters = LoadedAdapters(Backend(), ["m"], copies)
        source = write(tmp_path / "a")
        for number in range(ADAPTERS_MAX):
            await adapters.load(f"a{number}", source)
        with pytest.raises(AdapterRefused, match="maximum"):
            await adapters.load("more", source)
        await adapters.load("a0", source)

    asyncio.run(scenario())


def test_an_adapter_that_the_engine_refuses_is_not_loaded(tmp_path, copies):
    adapters = LoadedAdapters(Backend("sql"), ["m"], copies)

    with pytest.raises(AdapterRefused, match="rank"):
        asyncio.run(adapters.load("sql", write(tmp_path / "a")))
    assert adapters.loaded == []


def test_adapters_of_the_settings_are_loaded_or_stop_the_worker(tmp_path, copies):
    write(tmp_path / "loras" / "sql-v2")
    other = write(tmp_path / "mail")
    adapters = LoadedAdapters(Backend(), ["m"], copies)

    asyncio.run(load_at_start(adapters, f"sql=sql-v2, mail={other}", str(tmp_path / "loras")))
    assert [one.name for one in adapters.loaded] == ["sql", "mail"]

    asyncio.run(load_at_start(None, "", ""))
    for given, engine in (("sql=nowhere", adapters), ("sql", adapters), ("sql=sql-v2", None)):
        with pytest.raises(EngineRefused):
            asyncio.run(load_at_start(engine, given, str(tmp_path / "loras")))


def test_pairs_are_name_and_path():
    assert parse_adapters(" a=b  c=/d/e=f ") == {"a": "b", "c": "/d/e=f"}
    for text in ("a", "=b", "a=", "a=b a=c"):
        with pytest.raises(ValueError, match="WORKER_LORA_ADAPTERS"):
            parse_adapters(text)
