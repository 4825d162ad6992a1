"""The version of the wire, with one line for each change that an older process would not understand."""

WIRE_VERSION = 2
"""
1: first version.
2: messages, fields and subjects renamed.
"""
