"""What a program writes into a page stands between two marks; the prose around it is written by people."""

from __future__ import annotations

BEGIN, END = "<!-- measured -->", "<!-- end of what is measured -->"


def replaced(page: str, measured: str) -> str:
    """The page with this between its marks. Raises ValueError when it has none."""
    before, begin, rest = page.partition(BEGIN)
    _old, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page lacks {BEGIN} or {END}")
    return f"{before}{BEGIN}\n{measured}{END}{after}"
