"""The fault tests of the KV exchange with a model whose layers are all alike, one with states, and an MLA model; with a
prefill engine of two pipeline stages; with engines that draft; with a rank of a data parallel group on one side; and with
a decode engine on two hosts.
"""

from __future__ import annotations

from tests.engines.kv_pair import KINDS, pair_of
from tests.engines.test_kv_faults import *  # noqa: F403  # All tests, marks and fixtures; ``pair`` is replaced.

pair = pair_of(*KINDS)
