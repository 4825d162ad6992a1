#!/bin/sh
# Resolves requirements/*.in into requirements/*.txt: exact versions with hashes, for CPython 3.11 to 3.13 on Linux, on
# x86-64 and Arm ([tool.uv] in pyproject.toml). Without `--upgrade` only what the .in files ask for changes.
#
# One environment may hold services, checks and one engine, so everything is resolved against the strictest set, the
# CPU engine. Files name no index: pip uses whichever it is configured with. Needs `uv` (pip install uv). The hashes of
# torch's CPU builds come from PyTorch's own index; where it cannot be reached, the present ones stay.
set -eu
cd "$(dirname "$0")/../requirements"
uv=${UV:-uv}
torch_cpu_from=${TORCH_CPU_FROM:-https://download.pytorch.org/whl/cpu/torch/}
all=$(mktemp)
torch=$(mktemp)
trap 'rm -f "$all" "$torch"' EXIT

# What uv says of a package that every platform and Python gets.
everywhere="python_full_version < '3.14' and implementation_name == 'cpython' and (\
(platform_machine == 'aarch64' and platform_python_implementation == 'CPython' and sys_platform == 'linux') or \
(platform_machine == 'x86_64' and platform_python_implementation == 'CPython' and sys_platform == 'linux'))"

resolve() {
    for file in "$@"; do :; done
    "$uv" pip compile --quiet --generate-hashes --universal --python-version 3.11 \
        --no-emit-index-url --no-emit-find-links --no-header --no-annotate $upgrade "$@" >/dev/null
    sed -i "s/ ; $everywhere / /" "$file"
}

# torch's CPU build with the hashes of all its files: those of PyTorch's index, or those that are locked already.
cpu_build() {
    locked=$(sed -n '/^torch==/,/[^\\]$/p' engine-cpu.txt)
    wanted=$(grep '^torch==' torch-pypi.in)+cpu
    echo "$wanted" | "$uv" pip compile --quiet --generate-hashes --no-deps --python-version 3.11 --no-header --no-annotate \
        --python-platform x86_64-manylinux_2_28 --no-emit-find-links --find-links "$torch_cpu_from" - 2>/dev/null && return
    case $locked in "$wanted "*) echo "$locked" ;; *) echo "$torch_cpu_from has no $wanted" >&2; exit 1 ;; esac
}

upgrade=${1:-}
cat engine-cpu.txt dev.txt | sed 's/^\(torch==[^ ]*\)+cpu/\1/' >"$all"
cpu_build > "$torch"
resolve uv.in --output-file uv.txt
resolve llama.in --output-file llama.txt
resolve s3.in --output-file s3.txt
resolve dist.in --output-file dist.txt
resolve --overrides overrides.txt engine-cpu.in services.in dev.in --output-file "$all"
resolve --overrides overrides.txt -c "$all" engine-cpu.in services.in --output-file engine-cpu.txt
resolve -c "$all" services.in --output-file services.txt
resolve -c "$all" services.in dev.in --output-file dev.txt
for engine in engine-cuda*.in; do
    resolve -c dev.txt "$engine" services.in --output-file "${engine%.in}.txt"
done
resolve -c engine-cpu.txt --no-emit-package triton torch-pypi.in --output-file torch-pypi.txt
sed -i -e "/^torch==/r $torch" -e '/^torch==/,/[^\\]$/d' engine-cpu.txt
