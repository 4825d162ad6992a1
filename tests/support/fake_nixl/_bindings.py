class nixlBackendError(Exception): ...  # noqa: N801


class nixlAgent: ...  # noqa: N801
