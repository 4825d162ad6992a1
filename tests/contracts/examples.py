"""An example and a hypothesis strategy for any message type, made from its fields."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import strategies as st
from msgspec import inspect as types

from shared.contracts.catalogue import messages

ALL_MESSAGES = messages()
TEXT = st.text(max_size=20)


def example(message_type: type[msgspec.Struct]) -> msgspec.Struct:
    """A message with every field set, none of them to its default."""
    fields = {field.name: _example(field.type, field.name) for field in types.type_info(message_type).fields}
    return message_type(**fields)


def _example(kind: types.Type, name: str) -> Any:  # noqa: PLR0911
    match kind:
        case types.StrType():
            return name
        case types.IntType():
            return 7
        case types.FloatType():
            return 0.5
        case types.BytesType():
            return name.encode()
        case types.BoolType():
            return False
        case types.EnumType():
            return list(kind.cls)[-1]
        case types.ListType():
            return [_example(kind.item_type, name)]
        case types.DictType():
            return {"key": _example(kind.value_type, name)}
        case types.UnionType():
            return _example(next(one for one in kind.types if not isinstance(one, types.NoneType)), name)
        case types.StructType():
            return example(kind.cls)
    raise TypeError(f"{name}: {kind} has no place in a contract")


def strategy(message_type: type[msgspec.Struct]) -> st.SearchStrategy[msgspec.Struct]:
    fields = {field.name: _strategy(field.type) for field in types.type_info(message_type).fields}
    return st.builds(message_type, **fields)


def _strategy(kind: types.Type) -> st.SearchStrategy[Any]:  # noqa: PLR0911
    match kind:
        case types.StrType():
            return TEXT
        case types.IntType():
            return st.integers(min_value=-(2**63), max_value=2**64 - 1)
        case types.FloatType():
            return st.floats(allow_nan=False)
        case types.BytesType():
            return st.binary(max_size=40)
        case types.BoolType():
            return st.booleans()
        case types.EnumType():
            return st.sampled_from(list(kind.cls))
        case types.ListType():
            return st.lists(_strategy(kind.item_type), max_size=3)
        case types.DictType():
            return st.dictionaries(TEXT, _strategy(kind.value_type), max_size=3)
        case types.UnionType():
            return st.one_of(*(_strategy(one) for one in kind.types))
        case types.NoneType():
            return st.none()
        case types.StructType():
            return strategy(kind.cls)
    raise TypeError(f"{kind} has no place in a contract")
