"""The block table in C, or in Python where no compiler was available when Baton was installed.

The C sources are in ``services/router/native``; both implementations pass the same tests.
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
    """The fastest implementation available."""
    return NativeBlockTable() if IS_COMPILED else PythonBlockTable()
