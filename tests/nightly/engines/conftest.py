"""NATS and a router's end of the bus, as the tests in ``tests/engines`` have them."""

from tests.engines.conftest import nats_url, router, run_dir

__all__ = ["nats_url", "router", "run_dir"]
