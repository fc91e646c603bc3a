#!/usr/bin/env bash
# All GPU tests in parallel processes, then the kernel benchmark alone. Needs python3 with torch, triton, transformers and
# pytest, nothing else. Logs go to the folder given (default: out/gpu).
#   benchmarks/gpu_check.sh [FOLDER] [SECONDS_FOR_TESTS] [SECONDS_FOR_BENCHMARK]
set -u
cd "$(dirname "$0")/.."
out=${1:-out/gpu}
tests_s=${2:-600}
bench_s=${3:-600}
logs=$(mktemp -d)
mkdir -p "$out"
export PYTHONPATH=$PWD PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1 TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-$logs/cache}
# The project's pytest settings ask for plugins that a GPU image may not have.
check() { # NAME ARGUMENTS...
    local name=$1
    shift
    timeout "$tests_s" python3 -m pytest -q -c /dev/null --rootdir="$PWD" --import-mode=importlib -p no:cacheprovider \
        -W ignore --tb=short -m gpu "$@" >"$logs/$name.log" 2>&1 &
}
k=tests/kernels
check rows $k/norms $k/gated_group_norm $k/gating $k/attention_inputs
check conv $k/causal_conv1d $k/test_snapshots.py
check delta $k/gated_delta_rule -k "not key_dims"
check delta_dims $k/gated_delta_rule -k key_dims
check ssd $k/mamba2_ssd
check attention $k/paged_attention -k "not shapes"
check attention_shapes $k/paged_attention -k shapes
check models_qwen tests/gpu -k "qwen or shipped"
check models_other tests/gpu -k "not qwen and not shipped"
# Compiles the benchmark's kernels meanwhile.
for part in delta_prefill attention_prefill attention_decode delta_decode convolution elementwise mamba; do
    timeout "$tests_s" python3 -m benchmarks.kernels --dry --sweep --part $part >"$logs/dry_$part.log" 2>&1 &
done
wait
for log in "$logs"/*.log; do
    echo "=== $(basename "$log" .log)"
    tail -n 200 "$log"
done >"$out/tests.log"
grep -hE "^(FAILED|ERROR)|passed|failed|^E  |=== " "$out/tests.log" | cut -c1-200 | head -150
timeout "$bench_s" python3 -m benchmarks.kernels --sweep --json "$out/kernels.json" 2>&1 | tee "$out/kernels.log"
