"""How many examples property tests draw: few in every run, many in `make nightly`."""

from __future__ import annotations

import os

from hypothesis import Phase, settings
from hypothesis import strategies as st

PROFILE = os.environ.get("TEST_PROFILE", "ci")
NIGHTLY_FACTOR = 20

# No deadline: how long one example takes depends on what else the machine does.
settings.register_profile("ci", deadline=None, max_examples=50)
settings.register_profile("nightly", deadline=None, max_examples=100 * NIGHTLY_FACTOR, print_blob=True)


def examples(count: int) -> int:
    """``count``, or many times as many in the nightly profile."""
    return count * NIGHTLY_FACTOR if PROFILE == "nightly" else count


SEEDS = st.integers(0, 2**32 - 1)
"""Of a random generator that makes a whole run."""


def seeded(count: int) -> settings:
    """``count`` runs with SEEDS, or many times as many in the nightly profile. Another seed is not simpler: no shrinking."""
    return settings(max_examples=examples(count), phases=[Phase.explicit, Phase.reuse, Phase.generate])
