"""The version of the wire. A line for each change that an older process would not understand."""

WIRE_VERSION = 1
"""1: the first."""
