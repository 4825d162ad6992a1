"""What compiled code remembers of a look-up never differs from looking it up again."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest

HERE = Path(__file__).resolve().parent
NATIVE = HERE.parents[2] / "shared" / "native"
NOTHING = object()


@pytest.fixture(scope="module")
def cached(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    """The caches at places numbered from 0: ``attribute(place, object, name)`` and so on."""
    compiler, mypyc = shutil.which("cc"), importlib.util.find_spec("mypyc")
    if compiler is None or mypyc is None or mypyc.origin is None:
        pytest.skip("the router is not compiled here: that needs a C compiler and mypy")
    library = tmp_path_factory.mktemp("inline_cache") / f"inline_cache_module{sysconfig.get_config_var('EXT_SUFFIX')}"
    headers = [sysconfig.get_paths()["include"], str(Path(mypyc.origin).parent / "lib-rt"), str(NATIVE)]
    sources = [str(HERE / "inline_cache_module.c"), str(NATIVE / "inline_cache.c")]
    options = ["-shared", "-fPIC", "-O1", *(f"-I{folder}" for folder in headers)]
    subprocess.run([compiler, *options, *sources, "-o", str(library)], check=True, timeout=60)
    spec = importlib.util.spec_from_file_location("inline_cache_module", library)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Message(msgspec.Struct):
    text: str = "text"
    number: int = 1


class Slots:
    __slots__ = ("value",)
    value: Any

    def twice(self) -> Any:
        return [self.value, self.value]


def outcome(look: Callable[[], Any]) -> Any:
    """What it returns, or the type of what it raises."""
    try:
        return look()
    except (AttributeError, KeyError, TypeError) as error:
        return type(error)


def same_attribute(cached: ModuleType, place: int, thing: Any, name: str) -> Any:
    """The attribute, having been found twice at that place as Python finds it."""
    plain = outcome(lambda: getattr(thing, name))
    for _ in range(2):
        assert outcome(lambda: cached.attribute(place, thing, name)) == plain
    return plain


def test_an_attribute_is_what_the_object_has_now(cached: ModuleType) -> None:
    one, other = Message(text="a"), Message(text="b")
    assert same_attribute(cached, 0, one, "text") == "a"
    assert same_attribute(cached, 0, other, "text") == "b"
    one.text = "c"
    assert same_attribute(cached, 0, one, "text") == "c"
    assert same_attribute(cached, 0, one, "number") == 1  # Another name at the same place.
    slots = Slots()
    assert same_attribute(cached, 0, slots, "value") is AttributeError
    slots.value = 5
    assert same_attribute(cached, 0, slots, "value") == 5
    del slots.value
    assert same_attribute(cached, 0, slots, "value") is AttributeError


def test_a_class_that_changes_is_looked_at_again(cached: ModuleType) -> None:
    kind: Any = type("Changing", (), {"__slots__": ("value",)})
    one = kind()
    one.value = 1
    assert same_attribute(cached, 1, one, "value") == 1
    kind.value = property(lambda _self: 2)
    assert same_attribute(cached, 1, one, "value") == 2
    kind.value = 3
    assert same_attribute(cached, 1, one, "value") == 3
    del kind.value
    assert same_attribute(cached, 1, one, "value") is AttributeError


def test_getters_in_c_and_plain_attributes_are_found(cached: ModuleType) -> None:
    assert same_attribute(cached, 2, memoryview(b"abc"), "nbytes") == 3
    assert same_attribute(cached, 2, memoryview(b"abcd"), "nbytes") == 4
    failed: Any = ValueError("x")
    assert same_attribute(cached, 2, failed, "args") == ("x",)
    assert same_attribute(cached, 2, failed, "missing") is AttributeError
    failed.missing = 1
    assert same_attribute(cached, 2, failed, "missing") == 1
    assert same_attribute(cached, 2, failed, "long" * 50) is AttributeError  # CPython remembers no name so long.
    assert same_attribute(cached, 2, Message, "__name__") == "Message"
    assert same_attribute(cached, 2, 1 + 2j, "real") == 1.0


def test_a_module_may_change(cached: ModuleType) -> None:
    module: Any = ModuleType("one")
    other = ModuleType("other")
    for value in (1, 2, NOTHING):
        module.value = value
        assert same_attribute(cached, 3, module, "value") is value
        assert same_attribute(cached, 3, other, "value") is AttributeError
    del module.value
    assert same_attribute(cached, 3, module, "value") is AttributeError
    assert same_attribute(cached, 3, module, "__dict__") is module.__dict__
    module.__getattr__ = lambda name: name.upper()
    assert same_attribute(cached, 3, module, "value") == "VALUE"


def test_a_method_is_that_of_the_object(cached: ModuleType) -> None:
    for _ in range(2):
        numbers = [1]
        cached.call_method(0, "append", numbers, 2)
        assert numbers == [1, 2]
        assert cached.call_method(0, "get", {"a": 1}, "a") == 1
        assert outcome(lambda: cached.call_method(0, "missing", [])) is AttributeError
        assert outcome(lambda: cached.call_method(0, "append", [])) is TypeError


def test_a_method_that_is_replaced_is_called(cached: ModuleType) -> None:
    kind: Any = type("Changing", (Slots,), {"__slots__": ()})
    one = kind()
    one.value = 1
    assert [cached.call_method(1, "twice", one) for _ in range(2)] == [[1, 1]] * 2
    kind.twice = lambda self: self.value
    assert [cached.call_method(1, "twice", one) for _ in range(2)] == [1] * 2
    del kind.twice
    assert cached.call_method(1, "twice", one) == [1, 1]


@pytest.mark.parametrize("base", [ValueError, object])
def test_an_object_s_own_attribute_goes_before_its_class_s_method(cached: ModuleType, base: type) -> None:
    # Exceptions have a place for their dictionary, other classes of Python a managed one.
    kind: Any = type("Kind", (base,), {"say": lambda _self: "class"})
    plain, own = kind(), kind()
    own.say = lambda: "object"
    for one, said in ((plain, "class"), (own, "object"), (plain, "class")):
        assert [cached.call_method(2, "say", one) for _ in range(2)] == [said] * 2
    plain.say = lambda: "later"
    assert cached.call_method(2, "say", plain) == "later"


def test_an_item_is_what_the_dictionary_has_now(cached: ModuleType) -> None:
    names: dict[str, Any] = {"one": 1}
    for change in range(12):  # More often than a place remembers.
        names["one"] = change
        assert [cached.item(0, names, "one") for _ in range(2)] == [change] * 2
        assert cached.item(0, {"one": "other"}, "one") == "other"
        assert cached.item(1, names, "one") == change
    del names["one"]
    for place in (0, 1, 2):
        assert outcome(partial(cached.item, place, names, "one")) is KeyError

    class Counting(dict[str, int]):
        def __missing__(self, key: str) -> int:
            return len(key)

    assert [cached.item(3, Counting(), "abc") for _ in range(2)] == [3, 3]


def test_a_string_that_is_no_name_is_not_held(cached: ModuleType) -> None:
    sent = bytes(8).hex()
    before = sys.getrefcount(sent)

    assert cached.item(4, {sent: 1}, sent) == 1

    assert sys.getrefcount(sent) == before
