"""A bounded dictionary drops its oldest entry, however entries are added."""

from __future__ import annotations

from shared.bounded import Bounded


def test_the_oldest_entry_is_dropped():
    kept = Bounded[str, int](2)

    kept["a"] = 1
    kept.update(b=2, c=3)
    kept.setdefault("d", 4)

    assert dict(kept) == {"c": 3, "d": 4}


def test_a_new_value_makes_an_entry_younger_only_where_the_old_one_is_popped():
    kept = Bounded[str, int](2)
    kept.update(a=1, b=2)

    kept["a"] = 3
    kept["c"] = 4
    assert dict(kept) == {"b": 2, "c": 4}

    kept["b"] = kept.pop("b")
    kept["d"] = 5
    assert dict(kept) == {"b": 2, "d": 5}
