#!/bin/sh
# All checks. Every part runs even when an earlier one fails, so that one run names everything there is to mend.
set -u
cd "$(dirname "$0")/.."

out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT

# A part's lines appear when it has ended. $out/NAME.failed remains where it failed.
part() {
    name=$1
    shift
    started=$(date +%s)
    if "$@" >"$out/$name" 2>&1; then
        printf '  ok      %-12s %s s\n' "$name" "$(($(date +%s) - started))"
    else
        touch "$out/$name.failed"
        { printf '  FAILED  %-12s %s\n' "$name" "$*"; cat "$out/$name"; } >&2
    fi
}

bin=.venv/bin
# mypy takes one core for as long as half of the tests take both, so it runs beside them.
part types "$bin/mypy" &
part format "$bin/ruff" format --check --quiet .
part lint "$bin/ruff" check --quiet .
part layers "$bin/lint-imports"
part generated "$bin/python" -m shared.contracts.catalogue --check
part pages "$bin/python" -m scripts.make_pages --check
part figures "$bin/python" -m bench.study --check-marks
part structure "$bin/python" scripts/check_structure.py
# schemathesis, which only nightly tests use, costs each of pytest's processes a quarter of a second.
part tests env TEST_PROFILE=check BATON_COMPILED=false "$bin/python" -m pytest -p no:schemathesis -n "${JOBS:-3}" --no-loadscope-reorder \
    -m "not slow and not nats and not vllm and not gpu and not compose" tests/unit tests/contracts tests/properties
wait

failed=$(cd "$out" && ls | sed -n 's/\.failed$//p' | paste -sd ' ')
[ -z "$failed" ] || { echo "check failed: $failed" >&2; exit 1; }
