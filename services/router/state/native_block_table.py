"""The block table in C where it was built, in Python where it was not (no compiler when Baton was installed).

The C sources are in ``services/router/native``; both kinds stand the same tests.
"""

from __future__ import annotations

from services.router.state.block_table import BlockTable, PythonBlockTable

try:
    from services.router.native._block_table import NativeBlockTable
except ImportError:
    IS_COMPILED = False
else:
    IS_COMPILED = True


def block_table() -> BlockTable:
    """The fastest there is here."""
    return NativeBlockTable() if IS_COMPILED else PythonBlockTable()
