#!/usr/bin/env bash
# What only a GPU can show, in two parts of at most 240 s each, the build included.
#
#   benchmarks/gpu_day.sh right     build, then tests/gpu, and memcheck beside them over its small tests
#   benchmarks/gpu_day.sh cost      build if need be, then benchmarks/bench_gpu.py and bench_host.py
#   benchmarks/gpu_day.sh --plan    print the commands with their limits in seconds, and run nothing
#
#   RESULTS=folder     where logs and JSON go (default: build/gpu)
#   PYTHON=python3     the interpreter; brings torch with CUDA, numpy, ninja, setuptools, pytest and transformers
#
# Needs nvcc and compute-sanitizer; no network. Each command writes its log while it runs, so that a run which is cut
# off has told something. Exit status: 0 if all commands have passed, else 1.
set -uo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-python3}
RESULTS=${RESULTS:-build/gpu}
PATH=$PATH:${CUDA_HOME:-/usr/local/cuda}/bin
export PATH FORCE_CUDA=1 NANWATCH_REQUIRE_EXT=1 PYTHONUNBUFFERED=1 PYTHONPATH=$PWD/python

PYTEST="$PYTHON -m pytest -q -p no:cacheprovider -m cuda"
SANITIZE="compute-sanitizer --target-processes all --error-exitcode 9 --tool memcheck --kernel-name kns=nanwatch"
BUILD="$PYTHON setup.py build_ext --inplace"
TESTS="$PYTEST -n 6 --dist worksteal tests/gpu --durations=8"
MEMCHECK="$SANITIZE $PYTEST tests/gpu/test_cuda.py -k small"
COST="$PYTHON benchmarks/bench_gpu.py --json $RESULTS/gpu.json"
HOST="$PYTHON benchmarks/bench_host.py --tokens 150"

case "${1:-}" in
  --plan)
    printf '%s\n' "right 110 $BUILD" "right 130 $TESTS" "right 130 $MEMCHECK" "cost 110 $BUILD" "cost 130 $COST" "cost 40 $HOST"
    exit 0 ;;
  right | cost) ;;
  *) echo "usage: benchmarks/gpu_day.sh right | cost | --plan" >&2; exit 2 ;;
esac
TORCH_CUDA_ARCH_LIST=$($PYTHON -c 'import torch; print("%d.%d" % torch.cuda.get_device_capability())') || {
  echo "torch of $PYTHON sees no GPU; nothing was run" >&2
  exit 2
}
export TORCH_CUDA_ARCH_LIST # another architecture than the device's own would only take time
mkdir -p "$RESULTS"
failed=0

# run NAME SECONDS COMMAND: with its log, and the log's end on the screen.
run() {
  local begun=$SECONDS status
  timeout --kill-after=10 "$2" $3 >"$RESULTS/$1.log" 2>&1
  status=$?
  printf '== %s: status %s after %s s\n%s\n' "$1" $status $((SECONDS - begun)) \
    "$(tail -n 40 "$RESULTS/$1.log" | cut -c1-240)"
  return $status
}

if [ "$1" = right ] || ! compgen -G "python/nanwatch/_C*$($PYTHON -c 'import sys; print(sys.implementation.cache_tag)')*.so" >/dev/null; then
  run build 110 "$BUILD" || exit 1
fi
if [ "$1" = right ]; then
  run memcheck $((235 - SECONDS)) "$MEMCHECK" &
  run tests $((235 - SECONDS)) "$TESTS" || failed=1
  wait $! || failed=1
else
  run cost $((200 - SECONDS)) "$COST" || failed=1
  run host $((238 - SECONDS)) "$HOST" || failed=1
fi
exit $failed
