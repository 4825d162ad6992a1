"""Whether a smaller last chunk of a prompt, on the prefill engine, brings the second token sooner: computed.

    python -m bench.last_chunk

A handoff streams: the decode engine reads a chunk's KV after the chunk's step, while the next one is computed. The first
token comes with the last chunk's step. The second one needs all KV, and a step of the decode engine:

    read(i) = max(computed(i), read(i - 1)) + tokens(i) * bytes_per_token / rate + LATENCY_S
    second = read(last) + decode step

Step times are those of the replay (``step_models.py``): a table of published kernel measurements of an 8-billion-parameter
model on one H100, and first principles for 70 billion parameters on four. The prefill engine computes this prompt
alone; or others wait, whose tokens fill each step, so that a split adds a whole step. Reading by layers is beside it. The
tables go into ``docs/benchmarks/last-chunk.md``, between its marks.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from bench.marks import replaced
from replay.profile import PROFILES, Profile

PAGE = Path(__file__).resolve().parents[1] / "docs" / "benchmarks" / "last-chunk.md"
CHUNK = 2048
RATES_GBIT = (25, 100, 400)
PROMPTS = (1024, 2048, 4096, 8192, 16_384)
LASTS = (256, 512, 1024)
LAYERS = 36
LATENCY_S = 0.002
"""Assumed: a grant and the start of a read, between hosts."""
ENGINES = {
    "8 billion parameters on an H100, 147,456 bytes of KV a token": replace(
        PROFILES["8b"], step_model="table", kv_bytes_per_token=147_456
    ),
    "70 billion parameters, 327,680 bytes of KV a token": PROFILES["70b"],
}


def cut(tokens: int, last: int) -> list[int]:
    """The chunks of a prompt, of which the last one has at most ``last`` tokens; 0: as vLLM cuts it."""
    chunks = [min(CHUNK, tokens - begin) for begin in range(0, tokens, CHUNK)]
    if last and chunks[-1] > last:
        chunks[-1:] = [chunks[-1] - last, last]
    return chunks


def times(
    profile: Profile, chunks: list[int], rate_gbit: float, *, alone: bool, layers: int = 1
) -> tuple[float, float]:
    """Seconds to the first and the second token. ``layers``: pieces of each chunk that are read as they are computed, at
    no further cost.
    """
    token_s = profile.kv_bytes_per_token * 8 / (rate_gbit * 1e9)
    now = read = 0.0
    done = 0
    for count in chunks:
        others = 0 if alone else CHUNK - count
        step_s = profile.step_s(count + others, count * (done + count / 2) + others * others / 2, 0, 0)
        done += count
        for layer in range(1, layers + 1):
            read = max(now + step_s * layer / layers, read) + count * token_s / layers
        now += step_s
        read += LATENCY_S
    return now, read + profile.step_s(0, 0.0, 1, done)


def table(profile: Profile) -> str:
    """One engine's."""
    changes = [*(f"alone, {last}" for last in LASTS), "others wait, 512", f"{LAYERS} layers"]
    lines = [
        "| Gb/s | prompt tokens | first, second token ms | " + " | ".join(changes) + " |",
        "|---:|---:|---:|" + "---:|" * len(changes),
    ]
    for rate in RATES_GBIT:
        for prompt in PROMPTS:
            cells = []
            for last, alone in (*((last, True) for last in LASTS), (512, False)):
                before = times(profile, cut(prompt, 0), rate, alone=alone)
                after = times(profile, cut(prompt, last), rate, alone=alone)
                first, second = (100 * (new / old - 1) for old, new in zip(before, after, strict=True))
                cells.append(f"{first:+.0f}, {second:+.0f} %")
            first_s, second_s = times(profile, cut(prompt, 0), rate, alone=True)
            _first_s, layered_s = times(profile, cut(prompt, 0), rate, alone=True, layers=LAYERS)
            cells.append(f"+0, {100 * (layered_s / second_s - 1):+.0f} %")
            lines.append(f"| {rate} | {prompt:,} | {1e3 * first_s:.0f}, {1e3 * second_s:.0f} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Write the tables."""
    tables = [f"\n{name}:\n\n{table(profile)}\n" for name, profile in ENGINES.items()]
    PAGE.write_text(replaced(PAGE.read_text(), "".join(tables) + "\n"))


if __name__ == "__main__":
    main()
