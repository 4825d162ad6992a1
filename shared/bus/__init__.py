"""The bus.

nats-py imports aiohttp where that is installed (with vLLM it is), for WebSockets, which nobody uses here. That takes
a third of a small process's start; so nats-py is imported before anybody else does it, and told that there is none.
"""

import sys

if "nats" not in sys.modules and "aiohttp" not in sys.modules:
    sys.modules["aiohttp"] = None  # type: ignore[assignment]  # what import takes for "not to be had"
    try:
        import nats.aio.transport  # noqa: F401  # for what it does
    finally:
        del sys.modules["aiohttp"]
