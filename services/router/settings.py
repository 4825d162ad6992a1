"""What a router can be told, from ROUTER_* variables."""

from __future__ import annotations

from typing import Literal

import msgspec


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The router, from ROUTER_* variables. Every ``_s`` is seconds, every ``_bytes_max`` a bound in bytes."""

    host: str = "127.0.0.1"
    port: int = 8000
    shared_port: int = 0
    """A port that routers of one system share, beside their own: the kernel spreads connections over them. 0: none."""
    instance: str = ""
    """A name unique among routers, one subject token; made up when empty."""

    body_bytes_max: int = 32 * 1024 * 1024
    """A larger request body is refused with 413."""
    bodies_bytes_max: int = 512 * 1024 * 1024
    """Bodies of all requests that are on their way in or being served; more are refused with 503."""
    head_s_max: float = 20.0
    """A client that takes longer to ask, from the opening of its connection or from a request's first byte to the end
    of its head, is disconnected.
    """
    body_s_max: float = 60.0
    """A client that takes longer to send its body is refused."""
    read_s_max: float = 60.0
    """A client that takes longer to read the rest of an answer that is complete is disconnected."""
    answer_bytes_max: int = 256 * 1024 * 1024
    """A buffered answer that grows larger fails its request."""
    leg_buffer_bytes_max: int = 8 * 1024 * 1024
    """Frames that wait for a slow client; more abort the request."""
    requests_at_once_max: int = 8192
    """Requests served at a time; more are refused with 503."""

    request_s_max: float = 600.0
    """The whole request, its queueing and all attempts included."""
    prefill_s_max: float = 120.0
    """One prefill leg, from its start to its report."""
    first_frame_s_max: float = 120.0
    """From the start of the answering leg to its first frame, and from its head to its first data."""
    frame_gap_s_max: float = 60.0
    """Between two frames of a stream that has begun."""
    attempts_max: int = 3
    """Placements of one request, the first included, before its failure is told to the client."""
    drain_s_max: float = 30.0
    """After SIGTERM: time for running requests to end."""
    silent_s_max: float = 3.0
    """A worker that was not heard for so long gets nothing new."""

    stream_tokens_min: int = 1024
    """Prompt tokens to compute from which on both legs are dispatched together, and decode reads the KV as prefill
    computes it; 0: always, negative: never, decode then comes when prefill has ended.
    """
    fetch_tokens_min: int = 256
    """Fewer prompt tokens are computed, although another worker holds their KV; a body's ``kv_fetch_min_tokens`` says
    otherwise for its request.
    """

    tokenize: Literal["auto", "always", "never"] = "auto"
    """Whether prompts are tokenized for exact prefix match; ``auto``: if more than one worker could compute them."""
    tokenize_loop_chars_max: int = 4096
    """Characters of a prompt that are tokenized at once; the rest, in a thread, so that the event loop goes on."""
    tokenize_cache_bytes_max: int = 64 * 1024 * 1024
    """Pieces of prompts whose tokens and block hashes are remembered."""

    decisions_max: int = 10_000
    """Placements that are remembered, to be explained; the oldest are forgotten beyond that."""
    decisions_bytes_max: int = 64 * 1024 * 1024
    """Memory for them, about."""
    log_requests: bool = True
    """One line for each finished request."""
    keep_alive_s: float = 75.0
    """How long an idle client connection stays open."""
