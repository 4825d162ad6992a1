"""The failure of a command."""


class CommandFailed(Exception):
    """The running system did not do or answer what was asked; the message says why and what to do."""
