"""Which options of `baton up` belong to which model."""

from __future__ import annotations

import pytest
import typer
from typer.testing import CliRunner

from services.launcher.commands import up
from services.launcher.commands.up import by_model, model_options
from services.launcher.system.devices import engines_for
from services.launcher.system.machine import describe_machine


def test_options_after_a_model_are_its_own():
    order = ["model", "prefill", "decode", "host", "model", "both"]

    assert by_model(order, {"model": ["A", "B"], "prefill": [2], "decode": [1], "both": [3]}) == [
        {"model": "A", "prefill": 2, "decode": 1},
        {"model": "B", "both": 3},
    ]


def test_options_before_the_first_model_are_for_all_that_do_not_set_them():
    order = ["kv_cache", "both", "model", "model", "kv_cache"]

    assert by_model(order, {"model": ["A", "B"], "kv_cache": ["1G", "2G"], "both": [1]}) == [
        {"model": "A", "kv_cache": "1G", "both": 1},
        {"model": "B", "kv_cache": "2G", "both": 1},
    ]


def test_aliases_add_up():
    order = ["model", "aliases", "aliases"]

    assert by_model(order, {"model": ["A"], "aliases": ["chat", "fast"]}) == [
        {"model": "A", "aliases": ("chat", "fast")}
    ]


def test_without_a_model_the_options_are_those_of_the_default_one():
    assert by_model(["prefill"], {"model": None, "prefill": [2]}) == [{"prefill": 2}]
    assert by_model([], {"model": None}) == [{}]


@pytest.mark.parametrize(
    ("given", "join", "counts"),
    [
        ({}, False, (1, 1, 0)),
        ({}, True, (0, 0, 1)),
        ({"store": 1}, True, (0, 0, 0)),
        ({"both": 2}, False, (0, 0, 2)),
        ({"attach": ("http://h",)}, False, (0, 0, 0)),
        ({"attach": ("http://h",)}, True, (0, 0, 0)),
        ({"prefill": 0, "decode": 0}, False, (0, 0, 0)),
    ],
)
def test_a_model_without_counts_has_the_usual_workers(given: dict[str, int], join: bool, counts: tuple[int, ...]):
    model = model_options(given, join=join)

    assert (model.prefill, model.decode, model.both) == counts


@pytest.mark.parametrize(("given", "stores"), [({}, 1), ({"store": 2}, 2), ({"store": 0}, 1)])
def test_memory_of_the_host_starts_a_store(given: dict[str, int], stores: int):
    model = model_options({**given, "host_memory": "2GiB"}, join=False)

    assert (model.store, model.host_memory_bytes, model.prefill, model.decode) == (stores, 2 << 30, 1, 1)
    assert model_options({"host_memory": "2G"}, join=True).both == 0
    below = model_options({**given, "object_store": "http://h/b"}, join=False)
    assert (below.store, below.object_store) == (stores, "http://h/b")
    with pytest.raises(typer.BadParameter, match="'much' is not a size") as wrong:
        model_options({"host_memory": "much"}, join=False)
    assert wrong.value.param_hint == "--host-memory"


def read(*typed: str) -> tuple[list[tuple[str | int, ...]], str]:
    """The models of a whole command line, and what was printed."""
    found: list[tuple[str | int, ...]] = []

    def command(
        ctx: typer.Context,
        model: up.Model = None,
        prefill: up.Prefill = None,
        decode: up.Decode = None,
        both: up.Both = None,
        aliases: up.Alias = None,
        host: up.Host = "",
    ) -> None:
        models = up.models_of(ctx, join=False)
        found.extend((each.model, each.prefill, each.decode, each.both, *each.aliases) for each in models)

    app = typer.Typer()
    app.command(cls=up.UpCommand)(command)
    result = CliRunner().invoke(app, typed)
    assert result.exit_code == 0 or not found, result.output
    return found, result.output


def models_of(*typed: str) -> list[tuple[str | int, ...]]:
    found, said = read(*typed)
    assert found, said
    return found


def test_the_command_line_keeps_the_order_of_its_options(monkeypatch):
    for name in up.OF_ONE_MODEL:
        monkeypatch.delenv(name, raising=False)
    typed = (
        "--prefill",
        "1",
        "--decode=2",
        "--model",
        "A",
        "--host",
        "h",
        "--model=B",
        "--prefill",
        "0",
        "--both",
        "1",
    )

    assert models_of(*typed) == [("A", 1, 2, 0), ("B", 0, 2, 1)]
    assert models_of("--model", "A", "--alias", "x", "--alias", "y") == [("A", 1, 1, 0, "x", "y")]
    assert models_of("--both", "2") == [("", 0, 0, 2)]
    assert models_of("--model", "A", "--model", "B") == [("A", 1, 1, 0), ("B", 1, 1, 0)]


def test_auto_is_the_number_of_engines_that_this_machine_serves_most_with():
    assert models_of("--both", "auto") == [("", 0, 0, engines_for(describe_machine(), 1))]


@pytest.mark.parametrize(
    "typed",
    [("--both", "auto", "--prefill", "1"), ("--both", "auto", "--model", "A", "--model", "B"), ("--both", "-1")],
)
def test_auto_is_for_a_model_that_has_the_machine_to_itself(typed: tuple[str, ...]):
    found, said = read(*typed)

    assert found == []
    assert "--both" in said
