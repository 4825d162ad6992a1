"""The ``baton`` command: the whole system on one machine, no docker."""
