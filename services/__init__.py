"""Baton's processes.

Each collects cyclic garbage seldom: what it imports stays, and frames of tokens, which come and go by the hundred
thousand, have no cycles. With Python's own threshold a start takes a tenth longer, with vLLM a fifth. vLLM's EngineCore
imports this too.
"""

import gc

import shared  # noqa: F401  # Before any module below: it decides whether those that are compiled are used.

gc.set_threshold(50_000, 20, 50)
