"""Request bodies of the OpenAI and Anthropic APIs, and error responses in vLLM's format."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

NonNegative = Annotated[int, Meta(ge=0)]
Positive = Annotated[int, Meta(ge=1)]


class ApiError(Exception):
    """A response with an error status."""

    def __init__(
        self, message: str, *, status: int = 400, kind: str = "BadRequestError", param: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.body = msgspec.json.encode({"error": {"message": message, "type": kind, "param": param, "code": status}})
        self.anthropic_body = msgspec.json.encode({"type": "error", "error": {"type": kind, "message": message}})
        """The error in Anthropic's form, for clients of messages."""


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class SamplingBody(msgspec.Struct, frozen=True, kw_only=True):
    """Fields common to completions and chats. Sampling values are validated and otherwise ignored."""

    model: str | None = None
    max_tokens: Positive | None = None
    min_tokens: NonNegative | None = 0
    n: Positive | None = 1
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    seed: int | None = None
    temperature: Annotated[float, Meta(ge=0)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    prompt_logprobs: Annotated[int, Meta(ge=-1)] | None = None
    cache_salt: str | None = None


class CompletionBody(SamplingBody, frozen=True, kw_only=True):
    prompt: str | list[str | int | list[int]] | None = None
    max_tokens: Positive | None = 16
    echo: bool | None = False
    logprobs: NonNegative | None = None
    logprob_token_ids: list[int] | None = None
    return_tokens_as_token_ids: bool | None = None
    add_special_tokens: bool = True


class ChatBody(SamplingBody, frozen=True, kw_only=True):
    messages: list[dict[str, Any]]
    max_completion_tokens: Positive | None = None
    logprobs: bool | None = False
    top_logprobs: NonNegative | None = 0
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = True
    add_special_tokens: bool = False


class ResponseBody(SamplingBody, frozen=True, kw_only=True):
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: Positive | None = None
    previous_response_id: str | None = None
    tools: list[dict[str, Any]] | None = None


class MessageBody(SamplingBody, frozen=True, kw_only=True):
    """A request for a message, in Anthropic's form."""

    messages: list[dict[str, Any]]
    system: str | list[dict[str, Any]] | None = None
    stop_sequences: list[str] | None = None
    tools: list[dict[str, Any]] | None = None


B = TypeVar("B", CompletionBody, ChatBody, ResponseBody, MessageBody)

_READ_COMPLETION = msgspec.json.Decoder(CompletionBody)
_READ_CHAT = msgspec.json.Decoder(ChatBody)
_READ_RESPONSE = msgspec.json.Decoder(ResponseBody)
_READ_MESSAGE = msgspec.json.Decoder(MessageBody)


def read_completion(raw: bytes) -> CompletionBody:
    """Raises ApiError."""
    body = _read(_READ_COMPLETION, raw)
    if body.prompt is None or body.prompt == []:
        raise ApiError("Either prompt or prompt_embeds must be provided and non-empty.", param="prompt")
    return body


def read_chat(raw: bytes) -> ChatBody:
    """Raises ApiError."""
    body = _read(_READ_CHAT, raw)
    if not body.messages:
        raise ApiError("messages must contain at least one message", param="messages")
    if body.top_logprobs and not body.logprobs:
        raise ApiError("when using `top_logprobs`, `logprobs` must be set to true.", param="top_logprobs")
    return body


def read_response(raw: bytes) -> ResponseBody:
    """Raises ApiError."""
    body = _read(_READ_RESPONSE, raw)
    if body.previous_response_id is not None:
        message = f"Response with id '{body.previous_response_id}' not found."
        raise ApiError(message, status=404, kind="invalid_request_error", param="response_id")
    return body


def read_message(raw: bytes) -> MessageBody:
    """Raises ApiError."""
    body = _read(_READ_MESSAGE, raw)
    if body.max_tokens is None:
        raise ApiError("max_tokens: Field required", param="max_tokens")
    if not body.messages:
        raise ApiError("messages must contain at least one message", param="messages")
    return body


def chat_of(body: MessageBody) -> list[dict[str, Any]]:
    """The chat of Anthropic's messages, as vLLM makes it. Thoughts are left out, as by many chat templates."""
    system = body.system if isinstance(body.system, str) else "".join(_texts(body.system or []))
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    for message in body.messages:
        role, content = message.get("role", "user"), message.get("content", "")
        if isinstance(content, str):
            messages.append({"role": role, "content": content})
            continue
        blocks = [block for block in content if isinstance(block, dict)]
        if unknown := {str(block.get("type")) for block in blocks} - _BLOCKS:
            raise ApiError(f"Unsupported content block: {min(unknown)}", param="messages")
        messages += [
            {"role": "tool", "content": _text(block.get("content", ""))}
            for block in blocks
            if block["type"] == "tool_result"
        ]
        calls = [_call(block) for block in blocks if block["type"] == "tool_use"]
        if texts := _texts(blocks):
            parts = [{"type": "text", "text": text} for text in texts]
            messages.append({"role": role, "content": texts[0] if len(texts) == 1 else parts, "tool_calls": calls})
        elif calls:
            messages.append({"role": role, "tool_calls": calls})
    if not messages:
        raise ApiError("messages must contain some content", param="messages")
    return messages


_BLOCKS = {"text", "tool_use", "tool_result", "thinking", "redacted_thinking"}


def _texts(blocks: list[dict[str, Any]]) -> list[str]:
    return [str(block["text"]) for block in blocks if block.get("type") == "text" and block.get("text")]


def _text(content: Any) -> str:
    return "\n".join(_texts(content)) if isinstance(content, list) else str(content)


def _call(block: dict[str, Any]) -> dict[str, Any]:
    arguments = msgspec.json.encode(block.get("input") or {}).decode()
    return {"function": {"name": str(block.get("name", "")), "arguments": arguments}}


def messages_of(body: ResponseBody) -> list[dict[str, Any]]:
    """The chat of a response's input. Reasoning is left out, as by many chat templates."""
    messages = [{"role": "system", "content": body.instructions}] if body.instructions else []
    items = [{"role": "user", "content": body.input}] if isinstance(body.input, str) else body.input
    for item in items:
        kind = item.get("type", "message")
        if kind == "message":
            messages.append({"role": item.get("role", "user"), "content": item.get("content", "")})
        elif kind == "function_call":
            messages.append({"role": "assistant", "content": str(item.get("arguments", ""))})
        elif kind == "function_call_output":
            messages.append({"role": "tool", "content": str(item.get("output", ""))})
        elif kind != "reasoning":
            raise ApiError(f"Unsupported input item type: {kind}", param="input")
    if not messages:
        raise ApiError("input must contain at least one item", param="input")
    return messages


def prompts_of(prompt: str | list[str | int | list[int]]) -> list[str | list[int]]:
    """The prompts in ``prompt``. Raises ApiError for a list of different kinds."""
    if isinstance(prompt, str):
        return [prompt]
    kinds = set(map(type, prompt))
    if kinds == {int}:
        return [prompt]  # type: ignore[list-item]  # all are integers
    if len(kinds) > 1:
        raise ApiError("prompt must be a string, a list of strings, a list of tokens or a list of them", param="prompt")
    return prompt  # type: ignore[return-value]  # all strings, or all lists of integers


def stop_strings(body: SamplingBody) -> list[str]:
    """Raises ApiError for an empty string."""
    asked = body.stop_sequences if isinstance(body, MessageBody) else body.stop
    stops = [asked] if isinstance(asked, str) else asked or []
    if not all(stops):
        raise ApiError("stop cannot contain an empty string.", param="stop")
    return stops


def _read(decoder: msgspec.json.Decoder[B], raw: bytes) -> B:
    try:
        body = decoder.decode(raw)
    except msgspec.ValidationError as error:
        raise ApiError(f"1 validation error:\n  {error}", kind="Bad Request", param=_field(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ApiError(f"1 validation error:\n  JSON decode error: {error}", kind="Bad Request") from error
    except RecursionError as error:
        raise ApiError("1 validation error:\n  the JSON is nested too deeply", kind="Bad Request") from error
    if body.stream_options is not None and not body.stream:
        raise ApiError("Stream options can only be defined when `stream=True`.", param="stream_options")
    if body.max_tokens is not None and (body.min_tokens or 0) > body.max_tokens:
        raise ApiError("min_tokens must be less than or equal to max_tokens", param="min_tokens")
    return body


def _field(error: msgspec.ValidationError) -> str | None:
    """The top-level field in msgspec's message, which ends with "- at `$.n`"."""
    _, found, path = str(error).partition("`$.")
    return path.rstrip("`").split("[")[0].split(".")[0] if found else None
