"""Writes docs/OUTSIDE.md. A run of some suites replaces only their parts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.outside.compare import Comparison

HEAD = """# Checks that others wrote

`make outside` runs test suites and load generators of other projects against one plain vLLM engine (`vllm serve`) and
then against Baton with a prefill and a decode engine (`baton up`), both with `baton-tiny` on a CPU and the same vLLM
arguments, and compares them test by test. Baton's default mode is `disaggregated` meanwhile: each request that can be
split is split, if its prompt has a block of KV to hand over. What one engine passes, Baton must pass; each difference
has its reason below, or is a bug. Each run fetches foreign sources into a scratch folder; they are not part of this
repository. `make outside ARGS="--list"` lists
the suites, `ARGS="--only langchain,vllm-pd"` runs some, and `ARGS="--go-on"` continues where the latest run was
stopped.

A test that fails on both asks for something that this model or set-up does not have: a model that follows
instructions, adapters of the hub, a reasoning parser. So that answers end soon, control characters end them as the
model's end token does.
"""
LEFT_OUT = """## Left out

* **Open Responses** compliance tests: they are only in their git repository, not on npm or PyPI; `llm-comply` checks
  the same document. From a checkout: `bun run test:compliance --base-url http://127.0.0.1:8000/v1 --api-key unused
  --model baton-tiny`.
* vLLM's tests of responses with gpt-oss, of MCP tools and of budgets for thoughts: with a model that does not reason
  they fail after minutes of retries.
* vLLM's `tests/tool_use`, `tests/entrypoints/multimodal`, `pooling` and `speech_to_text`: they need models that call
  tools, see, embed or hear.
* Files of vLLM's folders above that send nothing to a server (tests of its classes, engines in the test's own process),
  or need a data set (`correctness`), a Unix socket (`test_uds`) or a model of images (`_vlm`).
* vLLM's other folders of `tests/entrypoints`: `launchers`, `rl`, `serve/dev`, `serve/middleware`, `serve/sagemaker` and
  `serve/lora` start servers with arguments of their own; `cohere` and `scale_out` are of endpoints that `vllm serve`
  has with an argument only or that serve a router, as Baton is one (`.../render`, `.../derender`). Of these Baton has
  only `/inference/v1/generate`, which `tests/engines/test_token_ids.py` compares with one engine.
* The SDKs' tests of endpoints that vLLM does not have (files, images, fine-tuning, ...): they are for a mock that makes
  answers from the OpenAPI document.
"""
TABLE = """
| suite | version | passed on one engine | passed on P/D | failed on both | skipped | differences | unexplained |
|---|---|---|---|---|---|---|---|
"""
WHY_CHARS_MAX = 160
SAME_REASON_CHARS = 70
ROW = re.compile(r"^\| \[([\w-]+)\]\(#[\w-]+\) \|.*$", re.MULTILINE)
SECTION = re.compile(r"^## ([\w-]+)\n(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Part:
    """What the page says of one suite: its row and its section."""

    row: str
    section: str


def write(page: Path, parts: Mapping[str, Part], order: Iterable[str]) -> None:
    """Put these parts into the page; the others stay as they are."""
    every = {**read(page), **parts}
    shown = [every[name] for name in order if name in every]
    rows = "\n".join(part.row for part in shown)
    page.write_text(HEAD + TABLE + rows + "\n\n" + "\n\n".join(part.section for part in shown) + f"\n\n{LEFT_OUT}")


def read(page: Path) -> dict[str, Part]:
    text = page.read_text() if page.exists() else ""
    rows = {match[1]: match[0] for match in ROW.finditer(text)}
    sections = {match[1]: match[0].strip() for match in SECTION.finditer(text)}
    return {name: Part(row, sections[name]) for name, row in rows.items() if name in sections}


def not_run(name: str, what: str, reason: str) -> Part:
    """A suite that could not run."""
    return Part(
        f"| [{name}](#{name}) | | not run | not run | | | | |", f"## {name}\n\n{what}.\n\nNot run: {_cell(reason)}"
    )


def compared(result: Comparison, facts: str) -> Part:
    """A suite that ran. ``facts``: date and modes, one sentence."""
    one, pd = result.counts(result.one_engine), result.counts(result.pd)
    differences, unexplained = result.differences(), result.unexplained()
    cells = [
        f"[{result.suite}](#{result.suite})",
        result.version,
        str(one["passed"]),
        str(pd["passed"]),
        str(len(result.neither())),
        str(one["skipped"]),
        str(len(differences)),
        str(len(unexplained)),
    ]
    blocks = [f"## {result.suite}", f"{result.what}.", facts, _figures(result), _cut_off(result)]
    blocks += [_differences(result), _failed(result.neither()), _skipped(result)]
    return Part(f"| {' | '.join(cells)} |", "\n\n".join(block for block in blocks if block))


def _figures(result: Comparison) -> str:
    if not result.pd.figures:
        return ""
    return (
        "Of one run, beside other work of the machine, and no benchmark. "
        f"One engine: {result.one_engine.figures}.\nP/D: {result.pd.figures}."
    )


def _cut_off(result: Comparison) -> str:
    cut = [name for name, run in (("one engine", result.one_engine), ("P/D", result.pd)) if run.cut_off]
    if not cut:
        return ""
    reached = [{outcome.test for outcome in run.outcomes} for run in (result.one_engine, result.pd)]
    compared = len(reached[0] & reached[1])
    return f"Cut off on {' and on '.join(cut)} before its end: {compared} tests were reached on both, and are compared."


def _differences(result: Comparison) -> str:
    """Grouped by outcomes and reason, which many tests share."""
    groups: dict[tuple[str, str, str], list[str]] = {}
    for one in result.differences():
        reason = one.reason or f"**unexplained**: {_cell(one.why)}"
        groups.setdefault((one.one_engine, one.pd, reason), []).append(one.test)
    if not groups:
        return "No differences."
    rows = (
        f"* {len(tests)}, {on_one} and {on_pd}: {reason} ({_names(tests)})"
        for (on_one, on_pd, reason), tests in groups.items()
    )
    return "\n".join(["Differences, with the outcome on one engine and on P/D:", "", *rows])


def _failed(tests: list[tuple[str, str]]) -> str:
    """Grouped by how the reason begins: what follows differs from test to test."""
    if not tests:
        return ""
    groups: dict[str, tuple[str, list[str]]] = {}
    for test, why in tests:
        reason = " ".join(why.split()).split(" + where ", 1)[0]
        groups.setdefault(reason[:SAME_REASON_CHARS], (reason, []))[1].append(test.rpartition("::")[2])
    rows = (f"* {len(names)}: {_cell(reason)} ({_names(names)})" for reason, names in groups.values())
    return "\n".join(["Failed on both:", "", *rows])


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in dict.fromkeys(names))


def _skipped(result: Comparison) -> str:
    counted = result.skipped().most_common()
    return (
        "\n".join(["Skipped on both:", "", *(f"* {count}: {_cell(why)}" for why, count in counted)]) if counted else ""
    )


def _cell(text: str) -> str:
    """As Markdown, in one line."""
    line = " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
    return line if len(line) <= WHY_CHARS_MAX else f"{line[:WHY_CHARS_MAX]}..."
