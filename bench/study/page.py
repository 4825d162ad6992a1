"""The measured part of docs/benchmarks/replay.md, from the rows that are kept beside it.

What is not measured again after a change of the code stays, marked: ``rendered`` compares the digest of each row with
that of the code. So the page is what its rows and the code make of it, and ``problems`` finds one that is not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import msgspec

from bench.marks import BEGIN, END, replaced
from bench.study.code_digest import analysis_digest, code_of
from bench.study.plan import PLAN
from bench.study.rows import COMPARED, Data, Group, Number, Range, Row, Versus, value_of

OLDER = "†"
ROOM_MIN = 0.01
"""Of the bound: less than that is no room."""
LEAD, EARLIER, ROOM_TAKEN = 0.10, -0.25, 0.5
"""At the knee: goodput above the best rival's, TTFT p95 below it, or the share of the room below the bound."""
NEVER_MEASURED = "*Older than the code*"
"""A page without rows must say so."""
PICTURES = {
    "differences": "Baton less the best rival",
    "goodput": "Goodput by load",
    "ttft": "Time to the first token at the knee",
}
CodeOf = Callable[[str], str]


def with_measured(page: str, data: Data, pictures: Sequence[str], now: CodeOf = code_of) -> str:
    """The page with its measured part replaced. Raises ValueError for a page that has none."""
    return replaced(page, rendered(data, pictures, now))


def problems(page: Path, rows: Path, pictures: Sequence[str], now: CodeOf = code_of) -> list[str]:
    """Why the page is not what its rows and the code make of it."""
    text = page.read_text(encoding="utf-8")
    if not rows.exists():
        measured = text.partition(BEGIN)[2].partition(END)[0]
        return [] if NEVER_MEASURED in measured else [f"{page} has no rows ({rows}), and does not say that it is old"]
    try:
        right = with_measured(text, read(rows), pictures, now)
    except ValueError as error:
        return [str(error)]
    if right != text:
        return [f"{page} is not what {rows.name} and the code make of it: run `make bench-replay ARGS=--mark`"]
    return []


def stale(data: Data, now: CodeOf = code_of) -> list[str]:
    """Rows that are older than the code."""
    return [
        f"{group.section}, {group.workload}, {group.fleet}, {group.label}: {row.policy}"
        for group in data.groups
        for row in group.rows
        if row.code != now(row.policy) or group.analysis != analysis_digest()
    ]


def read(rows: Path) -> Data:
    """The kept rows."""
    return msgspec.json.decode(rows.read_bytes(), type=Data)


def write(data: Data, rows: Path) -> None:
    """Keep them."""
    rows.write_bytes(msgspec.json.format(msgspec.json.encode(data), indent=1) + b"\n")


def rendered(data: Data, pictures: Sequence[str], now: CodeOf) -> str:
    """Markdown."""
    lines = [
        "## Results",
        "",
        f"`{data.command}`, {data.machine}; targets {data.ttft_s:g} s to the first token and",
        f"{data.itl_s * 1e3:g} ms between tokens. Ranges are 95 % intervals.",
        "",
    ]
    if data.is_quick:
        lines += ["**A quick run: small workloads, few seeds. It shows that the study works, not who wins.**", ""]
    if data.missing:
        lines += [f"Not measured, because their traces were not given: {', '.join(data.missing)}.", ""]
    old = sorted({row.measured_at for group in data.groups for row in group.rows if row.code != now(row.policy)})
    if old:
        lines += [f"{OLDER} Measured before a later change of the code it depends on, on {' and '.join(old)}.", ""]
    lines += comparisons(data.groups, now)
    lines += [f"![{PICTURES[name]}](replay-{name}.png)" for name in pictures] + [""] * bool(pictures)
    for section in dict.fromkeys(group.section for group in data.groups):
        told = PLAN.sections.get(section)
        lines += [f"### {told.title if told else section}", "", *([told.text, ""] if told else [])]
        seeds = sorted({len(group.seeds) for group in data.groups if group.section == section})
        lines += [f"Seeds: {' or '.join(map(str, seeds))}.", ""]
        groups = [group for group in data.groups if group.section == section]
        for group in filter(is_factorial, groups):
            lines += [*matrix_lines(group, now), ""]
        if tables := [line for group in groups if not is_factorial(group) for line in (*group_lines(group, now), "")]:
            lines += ["<details><summary>All policies</summary>", "", *tables, "</details>", ""]
    return "\n".join([*lines, *tuned_lines(data.groups)])


def tuned_lines(groups: Sequence[Group]) -> list[str]:
    """Policies whose values are not their defaults."""
    tuned = sorted({row.values for group in groups for row in group.rows if row.values != row.policy})
    return ["### Tuned values", "", ", ".join(f"`{name}`" for name in tuned), ""] if tuned else []


def comparisons(groups: Sequence[Group], now: CodeOf) -> list[str]:
    """One line for each of Baton's policies that has rivals."""
    lines = [
        "Each of Baton's policies less the best of the other systems' in the same measure, paired by seed and window. Room:",
        "how much of what the best rival leaves below the clairvoyant bound Baton takes. A p95 is infinite (inf) where more than",
        "5 % were refused. The goal: neither goodput is below the best rival's (by the interval), and at the knee goodput is at least",
        f"{LEAD * 100:g} % above it, or TTFT p95 {-EARLIER * 100:g} % below, or {ROOM_TAKEN * 100:g} % of the room is taken.",
        "",
        *table_head(
            ["section", "workload", "fleet", "load", "policy"],
            ["goodput", "goodput by tokens", "TTFT p95", "room taken", "goal"],
        ),
    ]
    count = len(lines)
    for group in groups:
        rows = {row.policy: row for row in group.rows}
        if is_factorial(group):
            continue  # Each cell against all cells of others says nothing; see ``matrix_lines``.
        for versus in group.versus:
            if not versus.rivals:
                continue
            mark = mark_of([rows[versus.policy], *(rows[name] for name in versus.rivals.values())], now)
            cells = [f"{relative(versus.differences[name])} ({versus.rivals[name]})" for name in COMPARED]
            name = group.workload + (" (tuned on)" if group.is_tuned else "")
            cells = [group.section, name, group.fleet, group.label, versus.policy + mark, *cells, room(group, versus)]
            cells.append(goal(group, versus))
            lines.append("| " + " | ".join(cells) + " |")
    return [*lines, ""] if len(lines) > count else []


def room(group: Group, versus: Versus) -> str:
    """Of goodput by requests."""
    taken, left = room_taken(group, versus)
    return "none left" if taken is None else f"{taken:.0%} of {left:.3g}/s"


def room_taken(group: Group, versus: Versus) -> tuple[float | None, float]:
    """Share that Baton takes of the room that the best rival leaves, and the room; None where there is none."""
    rows = {row.policy: value_of(row.goodput[0]) for row in group.rows}
    best = rows[versus.rivals["good_share"]]
    left = group.bound_per_s - best
    return None if left < ROOM_MIN * group.bound_per_s else (rows[versus.policy] - best) / left, left


def goal(group: Group, versus: Versus) -> str:
    """Whether it is met, and what is missed."""
    names = {"good_share": "goodput", "good_tokens_share": "tokens"}
    missed = [name for measure, name in names.items() if value_of(versus.differences[measure][2]) < 0.0]
    taken, _left = room_taken(group, versus)
    ahead = (
        value_of(versus.differences["good_share"][0]) >= LEAD
        or value_of(versus.differences["ttft_p95"][0]) <= EARLIER
        or taken is None
        or taken >= ROOM_TAKEN
    )
    if group.label == "knee" and not ahead:
        missed.append("lead")
    return f"missed: {', '.join(missed)}" if missed else "met"


def is_factorial(group: Group) -> bool:
    """Whether its policies are combinations of a rule, a queue and refusal."""
    return any("+" in row.policy for row in group.rows)


def matrix_lines(group: Group, now: CodeOf) -> list[str]:
    """Rules by queue and refusal; all else is in the rows beside the page."""
    good = {
        row.policy: f"{value_of(row.good_share[0]) * 100:.1f} / {value_of(row.good_tokens_share[0]) * 100:.1f}"
        for row in group.rows
    }
    rules = list(dict.fromkeys(policy.partition("+")[0] for policy in good))
    ways = list(dict.fromkeys(policy.removeprefix(policy.partition("+")[0]) for policy in good))
    lines = [
        f"#### {group.workload}, {group.fleet}, {group.label}: good % of requests / of tokens{mark_of(group.rows, now)}",
        "",
        *table_head(["rule"], [way.removeprefix("+").replace("+", ", ") or "at once" for way in ways]),
    ]
    return lines + ["| " + " | ".join([rule, *(good.get(rule + way, "") for way in ways)]) + " |" for rule in rules]


def group_lines(group: Group, now: CodeOf) -> list[str]:
    """One table, and shares by prompt length at the knee."""
    title = f"{group.workload}, {group.fleet}, {group.label}: {group.offered_per_s:.2f} requests/s"
    numbers = ["goodput/s", "tokens/s", "good %", "TTFT p50 s", "p95", "p99", "ITL p50 ms", "p95", "p99"]
    lines = [
        f"#### {title} (load {group.load:g}, {group.requests} requests, seeds: {len(group.seeds)})",
        "",
        *table_head(["policy"], [*numbers, "hit %", "+fetched %", "refused %", "preempted"]),
    ]
    for row in group.rows:
        cells = [
            row.policy + mark_of([row], now),
            spread(row.goodput, 3),
            spread(row.goodput_tokens, 0),
            spread(row.good_share, 1, 100),
            *(spread(each, 2) for each in (row.ttft_p50, row.ttft_p95, row.ttft_p99)),
            *(number(each, 1, 1e3) for each in row.itl_s),
            *(f"{each * 100:.1f}" for each in (row.hit_share, row.fetched_share, row.refused_share)),
            f"{row.preemptions:.0f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    shares = [min(1.0, group.bound_per_s / group.offered_per_s) * 100, group.bound_per_s, group.bound_tokens_per_s]
    mark = "" if group.analysis == analysis_digest() else f" {OLDER}"
    bound = [f"*bound*{mark}", f"{shares[1]:.3f}", f"{shares[2]:.0f}", f"{shares[0]:.1f}"]
    lines.append("| " + " | ".join(bound + [""] * 10) + " |")
    return lines + (bucket_lines(group) if group.label == "knee" else [])


def bucket_lines(group: Group) -> list[str]:
    """Served and good shares by prompt length."""
    starts = sorted({bucket.tokens_min for row in group.rows for bucket in row.buckets})
    names = [f"{start} to {end - 1}" for start, end in pairwise(starts)] + [f"from {start}" for start in starts[-1:]]
    lines = ["", *table_head(["served / good %, by prompt tokens"], names)]
    for row in group.rows:
        cells = {one.tokens_min: f"{one.served_share * 100:.1f} / {one.good_share * 100:.1f}" for one in row.buckets}
        lines.append("| " + " | ".join([row.policy, *(cells.get(start, "") for start in starts)]) + " |")
    return lines


def table_head(left: Sequence[str], right: Sequence[str]) -> list[str]:
    """Texts to the left, numbers to the right."""
    return ["| " + " | ".join([*left, *right]) + " |", "|" + "---|" * len(left) + "---:|" * len(right)]


def mark_of(rows: Sequence[Row], now: CodeOf) -> str:
    """Whether one is older than the code."""
    return f" {OLDER}" if any(row.code != now(row.policy) for row in rows) else ""


def number(value: Number, digits: int, scale: float = 1.0) -> str:
    """With so many digits behind the point."""
    return "inf" if value is None else f"{value * scale:.{digits}f}"


def spread(found: Range, digits: int, scale: float = 1.0) -> str:
    """A value with its interval."""
    value, low, high = (number(each, digits, scale) for each in found)
    return value if low == high == value else f"{value} ({low} to {high})"


def relative(found: Range) -> str:
    """A difference in per cent with its interval; bold where it is not zero."""
    value, low, high = (value_of(each) for each in found)
    text = f"{percent(value)} ({percent(low)} to {percent(high)})"
    return f"**{text}**" if low > 0.0 or high < 0.0 else text


def percent(value: float) -> str:
    """With its sign."""
    return "inf" if math.isinf(value) else f"{value * 100:+.1f} %"
