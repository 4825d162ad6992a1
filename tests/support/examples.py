"""How many examples property tests draw: few in `make check`, some in `make test`, many in `make nightly`."""

from __future__ import annotations

import os

from hypothesis import Phase, settings
from hypothesis import strategies as st

PROFILE = os.environ.get("TEST_PROFILE", "ci")
FACTORS = {"check": 1 / 6, "ci": 1 / 3, "nightly": 20}

# No deadline: how long one example takes depends on what else the machine does.
settings.register_profile("check", deadline=None, max_examples=8)
settings.register_profile("ci", deadline=None, max_examples=17)
settings.register_profile("nightly", deadline=None, max_examples=2000, print_blob=True)


def examples(count: int) -> int:
    """``count`` times the profile's factor, at least one."""
    return max(1, round(count * FACTORS[PROFILE]))


SEEDS = st.integers(0, 2**32 - 1)
"""Of a random generator that makes a whole run."""


def seeded(count: int) -> settings:
    """``examples(count)`` runs with SEEDS. Another seed is not simpler: no shrinking."""
    return settings(max_examples=examples(count), phases=[Phase.explicit, Phase.reuse, Phase.generate])
