#!/bin/sh
# Resolves requirements/*.in into requirements/*.txt: exact versions with hashes, for CPython 3.11 on Linux x86_64.
#
# One environment may hold services, checks and one engine, so everything is resolved against the strictest set, the
# CPU engine. Files name no index: pip uses whichever it is configured with. Needs `uv` (pip install uv). The CPU build
# of torch is looked for in TORCH_CPU_FROM: PyTorch's index, or a folder of wheels.
set -eu
cd "$(dirname "$0")/.."
uv=${UV:-uv}
torch_cpu_from=${TORCH_CPU_FROM:-https://download.pytorch.org/whl/cpu/torch/}
all=$(mktemp)
trap 'rm -f "$all"' EXIT

resolve() {
    "$uv" pip compile --quiet --generate-hashes --python-version 3.11 --python-platform x86_64-manylinux_2_28 \
        --no-emit-index-url --no-emit-find-links --no-header --no-annotate "$@" >/dev/null
}

cd requirements
rm -f services.txt dev.txt engine-cpu.txt engine-cuda.txt uv.txt llama.txt
resolve uv.in --output-file uv.txt
resolve llama.in --output-file llama.txt
resolve --find-links "$torch_cpu_from" --overrides overrides.txt engine-cpu.in services.in dev.in --output-file "$all"
resolve --find-links "$torch_cpu_from" --overrides overrides.txt -c "$all" engine-cpu.in services.in --output-file engine-cpu.txt
resolve -c "$all" services.in --output-file services.txt
resolve -c "$all" services.in dev.in --output-file dev.txt
resolve -c dev.txt engine-cuda.in services.in --output-file engine-cuda.txt
