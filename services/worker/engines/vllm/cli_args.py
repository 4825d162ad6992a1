"""vLLM's parser of its server's arguments, which releases have in different places."""

from __future__ import annotations

try:
    from vllm.entrypoints.common.cli_args import make_arg_parser, validate_parsed_serve_args
except ModuleNotFoundError:  # before 0.33
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args

__all__ = ["make_arg_parser", "validate_parsed_serve_args"]
