"""A package like nixl's, whose agent does with a peer's metadata what the metadata says."""

from tests.support.fake_nixl import _api, _bindings

__all__ = ["_api", "_bindings"]
