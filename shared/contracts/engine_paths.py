"""Paths of vLLM's server that routers serve by passing a request to workers, and the tools that it runs itself."""

from __future__ import annotations

TRANSCRIPTIONS, TRANSLATIONS = "/v1/audio/transcriptions", "/v1/audio/translations"
FORMS = frozenset({TRANSCRIPTIONS, TRANSLATIONS})
"""Paths whose bodies are forms (``multipart/form-data``), not JSON."""
INVOCATIONS = "/invocations"
"""Any body of the other endpoints, which vLLM tells apart by their fields (SageMaker's convention)."""
TOKENIZER_INFO = "/tokenizer_info"
"""Asked with GET, without a body."""
COUNT_TOKENS = "/v1/messages/count_tokens"
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
CHAT_BATCH = "/v1/chat/completions/batch"
"""Several conversations in one body, with a choice for each."""
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
GENERATE = "/inference/v1/generate"
"""Token ids in, token ids out; the parameters of sampling are an object of their own."""
PLACED = (COMPLETIONS, CHAT, RESPONSES, MESSAGES, GENERATE)
"""Placed by prefix."""
PASSED_THROUGH = (
    COUNT_TOKENS,
    CHAT_BATCH,
    "/generative_scoring",
    "/v1/embeddings",
    "/v2/embed",
    "/v1/score",
    "/v1/rerank",
    "/v2/rerank",
    "/score",
    "/rerank",
    "/pooling",
    "/classify",
    "/tokenize",
    "/detokenize",
    INVOCATIONS,
    TRANSCRIPTIONS,
    TRANSLATIONS,
)
"""One worker serves the whole request, as it is."""
SERVER_TOOLS = ("web_search_preview", "code_interpreter", "container", "mcp")
"""Types of a response's tools that vLLM's server runs if it was started with a tool server, and then asks its engine
again. All others are the client's: functions, namespaces of functions, and whatever else agents send.
"""
SERVED = frozenset((*PLACED, *PASSED_THROUGH, TOKENIZER_INFO))
METHODS = {TOKENIZER_INFO: "GET"}
"""Methods of paths that are not asked with POST."""
