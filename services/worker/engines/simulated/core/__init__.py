"""The simulated engine without its shell: pure, driven by ``now``."""
