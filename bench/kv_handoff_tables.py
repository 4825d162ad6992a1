"""Tables of handoffs, beside vLLM's connector and beside what physics asks for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

from bench import bench_kv_handoff as handoffs
from bench.bench_kv_handoff import OFFERED, STREAMED, UPSTREAM, Handoff
from bench.kv_bench_page import ms, table, with_interval

ALLOWED_S = 0.002
"""What a token of a handoff may cost beside a decode step and the bytes in a plain read."""
MB = 1e6
Found = dict[tuple[int, str], list[Handoff]]
"""By prompt length and method, those of one turn at one index."""


@dataclass(frozen=True)
class Work:
    """What the engines of a measurement have to move."""

    kv_bytes: int
    """For each token."""
    chunk: int
    """Tokens that a prefill engine computes in a step, and so a streamed handoff's last piece."""
    others: str
    """What upstream's engines do while ours are measured beside physics."""

    @property
    def about(self) -> str:
        return f"{self.kv_bytes / 1024:.0f} KB of KV per token, prefill in chunks of {self.chunk} tokens"


def handoff_lines(found: Found, work: Work) -> list[str]:
    """Every length and method beside vLLM's connector."""
    rows, waits, goes_on, speeds = [], [], [], []
    for length in lengths_of(found):
        ways = {how: found[length, how] for how in (STREAMED, OFFERED, UPSTREAM)}
        megabytes = f"{length * work.kv_bytes / MB:.0f}"
        rows.append([length, megabytes, len(ways[STREAMED]), *_beside_upstream(ways, ttft_of)])
        waits.append([length, megabytes, *_beside_upstream(ways, exposed_of)])
        goes_on.append([length, megabytes, *_beside_upstream(ways, second_of)])
        speeds.append([megabytes, *speed_cells(ways[OFFERED], ways[UPSTREAM])])
    return [
        "## Handoff: time to first token, and the handoff's share",
        "",
        f"One request at a time, new prompts, {work.about}. The engines of",
        "all three methods run side by side and take turns, in every order, each while the others are idle; a difference is",
        "between requests of the same turn: the median with its interval (sign test, 95%). Negative:",
        "faster than upstream.",
        "",
        *table(
            "prompt tokens | KV MB | turns | TTFT ms streamed | offered | upstream | streamed less upstream | offered less upstream",
            rows,
        ),
        "Exposed: from the end of the prefill leg to the first token of the decode leg. It is the prefill leg's token, and does",
        "not wait for the KV; upstream's decode engine samples its own.",
        "",
        *table(
            "prompt tokens | KV MB | exposed ms streamed | offered | upstream | streamed less upstream | offered less upstream",
            waits,
        ),
        "From the end of the prefill leg to the second token, which needs the KV and a step of the decode engine (upstream: two).",
        "",
        *table(
            "prompt tokens | KV MB | second token ms streamed | offered | upstream | streamed less upstream | offered less upstream",
            goes_on,
        ),
        "## Handoff: bytes per second",
        "",
        "Offered handoffs and upstream's: bytes divided by the time in which reads were in progress. Plain read: the bytes of the",
        "previous handoff, read again by the same idle engine with one plain NIXL read of the same pieces, with",
        "prepared descriptors. It is a reference and no limit: in some turns the exchange is faster.",
        "",
        *table(
            "KV MB | pieces | exchange GB/s | upstream GB/s | plain read GB/s | exchange / plain read, paired by turn",
            speeds,
        ),
    ]


def _beside_upstream(ways: dict[str, list[Handoff]], part: Callable[[Handoff], float]) -> list[str]:
    """The medians of all methods, and what ours take more."""
    more = [differences(ways[how], ways[UPSTREAM], part) for how in (STREAMED, OFFERED)]
    return [*(ms(handoffs.median_of(way, part)) for way in ways.values()), *more]


Moved = list[tuple[list[Handoff], float]]
"""Offered handoffs and streamed ones of a length, each with the seconds that its bytes take in a plain read."""


def _beside_steps(moved: Moved, firsts: list[handoffs.FirstStep]) -> list[object]:
    """The first token beside a step of the same engine, and the second one beside that and beside a first step."""
    steps, first_s = [one.step_s for one in firsts], median(one.step_s for one in firsts)

    def beyond(token_s: Callable[[Handoff], float], step_s: Callable[[Handoff], float]) -> list[str]:
        return [
            with_interval([token_s(one) - step_s(one) - moved_s for one in ways], "+.1f", 1e3)
            for ways, moved_s in moved
        ]

    return [
        *(ms(handoffs.median_of(ways, exposed_of)) for ways, _moved_s in moved),
        ms(handoffs.median_of(moved[0][0], step_of)),
        with_interval(steps, ".1f", 1e3),
        *(ms(moved_s) for _ways, moved_s in moved),
        *beyond(exposed_of, step_of),
        *beyond(second_of, step_of),
        *beyond(second_of, lambda _one: first_s),
    ]


def _beside_cached(moved: Moved, firsts: list[handoffs.FirstStep]) -> list[object]:
    """Exposed time beside the same request without a handoff."""
    every = [one for ways, _moved_s in moved for one in ways]
    return [
        with_interval([one.cached_ttft_s for one in every], ".1f", 1e3),
        with_interval([one.ttft_s for one in firsts], ".1f", 1e3),
        *(
            f"{median(one.recomputed for one in ways):.0f}, {median(one.cached_recomputed for one in ways):.0f}"
            for ways, _moved_s in moved
        ),
        *(
            with_interval([one.exposed_s - one.cached_ttft_s - moved_s for one in ways], "+.1f", 1e3)
            for ways, moved_s in moved
        ),
    ]


def physics_lines(found: Found, firsts: dict[int, list[handoffs.FirstStep]], work: Work) -> list[str]:
    """Exposed time against what no connector can avoid, where it goes, and the speed of reads."""
    rows, beside, parts, speeds = [], [], dict[str, list[list[object]]](), []
    for length in lengths_of(found):
        both = found[length, OFFERED], found[length, STREAMED]
        bytes_s = median(one.plain.seconds for one in both[0] if one.plain is not None)
        moved = list(zip(both, (bytes_s, bytes_s * min(1.0, work.chunk / length)), strict=True))
        rows.append([length, len(both[0]), *_beside_steps(moved, firsts[length])])
        beside.append([length, *_beside_cached(moved, firsts[length])])
        speeds.append([f"{length * work.kv_bytes / MB:.0f}", *speed_cells(both[0])])
        for how, ways in zip((OFFERED, STREAMED), both, strict=True):
            timed = [one.stages for one in ways if one.stages]
            head = f"{how}: prompt tokens | {' | '.join(timed[0])}"
            cells = [with_interval([one[name] for one in timed], ".1f", 1e3) for name in timed[0]]
            parts.setdefault(head, []).append([length, *cells])
    return [
        "## Handoff: beside what physics asks for",
        "",
        f"Offered and streamed in turn; {work.others}. A step of the same engine, and the handoff's bytes in a",
        "plain read (of the last chunk, if streamed), cannot be avoided. Decode step: between two tokens of a running request. First step:",
        "of a request whose prompt is cached, from vLLM's scheduling to its first token, on an engine with vLLM's own connector; vLLM",
        f"makes the request's inputs in it. Beyond: the time to the first or second token less a step and the bytes; the aim is at most {ALLOWED_S * 1e3:.0f} ms",
        "for the first. The second token is what a first token was that the decode engine sampled itself.",
        "",
        *table(
            "prompt tokens | turns | exposed ms offered | streamed | decode step ms | first step ms | bytes ms | last chunk's ms"
            " | first token: offered beyond a decode step ms | streamed | second token: offered beyond it | streamed"
            " | offered beyond a first step ms | streamed",
            rows,
        ),
        "Beside the same request without a handoff: the prompt and one more token, one request at a time on the same decode",
        "engine, which has the whole prompt cached. Its time to first token has the way there and back, admission and the first step. The",
        "same on the engine with vLLM's own connector, without a handoff. Beyond: the exposed time less that of the decode engine and the bytes. Computed: tokens of the handoff's",
        "decode leg, of the cached request.",
        "",
        *table(
            "prompt tokens | TTFT ms cached | without handoffs | computed offered, cached | computed streamed, cached"
            " | offered beyond ms | streamed beyond ms",
            beside,
        ),
        "Where the time to the second token goes, ms:",
        "",
        *(line for head, each in parts.items() for line in table(head, each)),
        "## Handoff: bytes per second, beside plain reads",
        "",
        f"Offered handoffs and plain reads; {work.others}.",
        "",
        *table("KV MB | pieces | exchange GB/s | plain read GB/s | exchange / plain read, paired by turn", speeds),
    ]


def lengths_of(found: Found) -> list[int]:
    return list(dict.fromkeys(length for length, _how in found))


def ttft_of(handoff: Handoff) -> float:
    return handoff.ttft_s


def exposed_of(handoff: Handoff) -> float:
    return handoff.exposed_s


def second_of(handoff: Handoff) -> float:
    return handoff.second_s


def step_of(handoff: Handoff) -> float:
    return handoff.step_s


def speed_of(handoff: Handoff) -> float:
    return handoff.bytes / handoff.read_s / 1e9


def differences(ours: list[Handoff], theirs: list[Handoff], part: Callable[[Handoff], float]) -> str:
    return with_interval([part(one) - part(other) for one, other in zip(ours, theirs, strict=True)], "+.1f", 1e3)


def speed_cells(ours: list[Handoff], *others: list[Handoff]) -> list[object]:
    pairs = [(one, one.plain) for one in ours if one.plain is not None]
    plain_speeds = [plain.bytes / plain.seconds / 1e9 for _one, plain in pairs]
    parts = [speed_of(one) / speed for (one, _plain), speed in zip(pairs, plain_speeds, strict=True)]
    pieces = median(plain.pieces for _one, plain in pairs)
    speeds = [*(handoffs.median_of(each, speed_of) for each in (ours, *others)), median(plain_speeds)]
    return [f"{pieces:.0f}", *(f"{speed:.2f}" for speed in speeds), with_interval(parts, ".2f")]
