"""``baton prefetch``: has a worker read what others have of a prompt's KV, before a request with that prompt comes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from services.launcher.commands.options import Json, StateDir, fail, router_url, show
from services.launcher.terminal import Console
from shared.contracts.engine_paths import CHAT, COMPLETIONS, GENERATE, RESPONSES
from shared.text.formats import counted, duration

EPILOG = """[bold]Examples[/]

[cyan]baton prefetch --model qwen3 history.txt[/]   the prompt of a completion

[cyan]baton prefetch chat.json[/]   the body of the next request: a chat, a completion or a response

[cyan]jq .messages chat.json | baton prefetch -[/]   a list of messages, from standard input

The router chooses the worker to which the request would go now. That worker reads what other
workers and stores have of the prompt's KV; nothing is computed. Requests come first: prefetches get
a share of the time that they leave. `baton explain` shows why that worker was chosen.

Programs order the same with [cyan]"baton": {"prefetch": true}[/] in a request's body (docs/using.md).

Where API keys are needed, BATON_API_KEY has one: only requests of its tenant find what is fetched."""
PATHS = {"messages": CHAT, "prompt": COMPLETIONS, "input": RESPONSES, "token_ids": GENERATE}
"""The path of a body, by the field that has its prompt."""
ANSWER_S_MAX = 60.0


class Prefetched(msgspec.Struct):
    """The router's answer."""

    object: str
    model: str
    worker: str
    prompt_tokens: int
    held_tokens: int
    fetched_tokens: int
    missing_tokens: int
    seconds: float
    reason: str = ""


def add_to(app: typer.Typer) -> None:
    app.command(rich_help_panel="Use it", epilog=EPILOG)(prefetch)


def prefetch(
    prompt: Annotated[
        str,
        typer.Argument(metavar="FILE", help="A file with a prompt, messages as JSON, or a body; - for standard input."),
    ],
    model: Annotated[str, typer.Option(help="The model.", show_default="that of the body, or the only one")] = "",
    url: Annotated[str, typer.Option(help="Address of a router.", show_default="that of the running system")] = "",
    state_dir: StateDir = None,
    json: Json = False,
) -> None:
    """Have a worker read a prompt's KV from other workers and stores, before its request comes."""
    path, body = request_of(read(prompt), model)
    show(ask(router_url(url, state_dir), path, body), draw, json=json)


def read(name: str) -> str:
    """The file's text; exits with the reason if there is none."""
    try:
        text = sys.stdin.read() if name == "-" else Path(name).expanduser().read_text(encoding="utf-8")
    except OSError as error:
        fail(f"{name}: {error.strerror}. Name a file with a prompt, or - for standard input.")
    except UnicodeDecodeError:
        fail(f"{name}: it is not text in UTF-8.")
    if not text.strip():
        fail(f"{'Standard input' if name == '-' else name} is empty: there is no prompt to prefetch.")
    return text


def request_of(text: str, model: str) -> tuple[str, dict[str, Any]]:
    """Path and body of the order. Text that is no JSON object or list of messages is a prompt."""
    try:
        read: Any = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        read = text
    if isinstance(read, list) and read and all(isinstance(one, dict) and "role" in one for one in read):
        body: dict[str, Any] = {"messages": read}
    elif isinstance(read, dict) and any(name in read for name in PATHS):
        body = dict(read)
    else:
        body = {"prompt": text}
    own = body.get("baton")
    body["baton"] = {**(own if isinstance(own, dict) else {}), "prefetch": True}
    body.pop("stream", None)
    if model:
        body["model"] = model
    return next(path for name, path in PATHS.items() if name in body), body


def ask(url: str, path: str, body: dict[str, Any]) -> Prefetched:
    """The router's answer; exits with the reason if there is none."""
    import httpx

    from services.launcher.bus_client import CommandFailed
    from services.launcher.router_api import base_of, decoded, reaching
    from services.launcher.system.machine import API_KEY_VARIABLE, key_headers

    base = base_of(url)
    try:
        with reaching(base):
            response = httpx.post(
                f"{base}{path}", json=body, headers=key_headers(), timeout=ANSWER_S_MAX, trust_env=False
            )
        return decoded(response, Prefetched, base, f"Set {API_KEY_VARIABLE} to an API key with the permission infer.")
    except CommandFailed as error:
        fail(str(error))


def draw(found: Prefetched, console: Console) -> None:
    """One line, and why nothing or not all was fetched."""
    text = f"{found.worker} had {counted(found.held_tokens)} of {counted(found.prompt_tokens)} tokens"
    if found.fetched_tokens:
        text += f" and has read {counted(found.fetched_tokens)} in {duration(found.seconds)}"
    console.print(f"{text}; {counted(found.missing_tokens)} are to be computed.", markup=False, soft_wrap=True)
    if found.reason:
        console.print(f"Why no more: {found.reason}.", markup=False, soft_wrap=True)
