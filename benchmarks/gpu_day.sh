#!/usr/bin/env bash
# One day with a GPU: build, test, sanitize and measure nanwatch on the device at hand, in at most 25 minutes.
#
#   benchmarks/gpu_day.sh                 all parts, the most important first; a part that has passed is left out
#   benchmarks/gpu_day.sh range step      only these parts, again if they have passed
#   benchmarks/gpu_day.sh --plan          print the parts with their limits in seconds, and run nothing
#
#   RESULTS=folder     where the results go (default: benchmarks/results/gpu-NAME, with the name of the device)
#   PYTHON=python3     the interpreter; brings torch with CUDA, numpy, ninja, setuptools and pytest
#
# Needs nvcc, compute-sanitizer and ncu; no network. Each part writes PART.log while it runs and PART.status when it
# ends, so that an interrupted day goes on where it stopped. Exit status: 0 if every part has passed, else 1.
set -uo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-python3}
CUDA_BIN=${CUDA_HOME:-/usr/local/cuda}/bin
PATH=$PATH:$CUDA_BIN
TOOLS="make OFFLINE=1 PYTHON=$PYTHON"
SANITIZER="compute-sanitizer --target-processes all --error-exitcode 9"
OURS="--kernel-name kns=nanwatch"
SMALL="$PYTHON -m pytest -q -p no:cacheprovider -m cuda tests/gpu/test_cuda_small.py"
# Clocks stay as they are: a rented device may not let them be set.
NCU="ncu --clock-control none --kernel-name regex:nanwatch --launch-count 12 --set basic"
NCU+=" --section MemoryWorkloadAnalysis --section WarpStateStats"

# name, limit in seconds, command. The sum is at most 1500.
PARTS=(
  "build|240|$TOOLS all"
  "selfcheck|60|$PYTHON -m nanwatch --selfcheck"
  "tests|240|$PYTHON -m pytest -q -p no:cacheprovider -m cuda tests --durations=10 --junitxml=RESULTS/tests.xml"
  "range|240|$PYTHON benchmarks/bench_range.py --device cuda --json RESULTS/range.json"
  "memcheck|120|$SANITIZER --tool memcheck $OURS $SMALL"
  "step|180|$PYTHON benchmarks/bench_step.py --device cuda --json RESULTS/step.json"
  "racecheck|100|$SANITIZER --tool racecheck $OURS $SMALL"
  "ncu|60|$NCU --csv --page raw --log-file RESULTS/ncu.csv $PYTHON benchmarks/bench_frame.py --only-kernels"
  "frame|60|$PYTHON benchmarks/bench_frame.py --json RESULTS/frame.json"
  "block_fit|40|$PYTHON benchmarks/bench_block_fit.py --device cuda --json RESULTS/block_fit.json"
  "synccheck|60|$SANITIZER --tool synccheck $OURS $SMALL"
  "initcheck|100|env PYTORCH_NO_CUDA_MEMORY_CACHING=1 $SANITIZER --tool initcheck $SMALL"
)

if [ "${1:-}" = --plan ]; then
  for part in "${PARTS[@]}"; do IFS='|' read -r name limit command <<<"$part"; echo "$limit $name: $command"; done
  exit 0
fi
for wanted in "$@"; do
  printf '%s\n' "${PARTS[@]}" | grep -q "^$wanted|" || {
    echo "there is no part $wanted; the parts are: $(printf '%s\n' "${PARTS[@]}" | cut -d'|' -f1 | paste -sd' ')" >&2
    exit 2
  }
done

device=$($PYTHON -c 'import torch; print(torch.cuda.get_device_name().lower().replace(" ", "-"))') || {
  echo "torch of $PYTHON sees no GPU; nothing was run" >&2
  exit 2
}
RESULTS=${RESULTS:-benchmarks/results/gpu-$device}
mkdir -p "$RESULTS"
# Architectures other than the device's own would only take time.
TORCH_CUDA_ARCH_LIST=$($PYTHON -c 'import torch; print("%d.%d" % torch.cuda.get_device_capability())')
export TORCH_CUDA_ARCH_LIST FORCE_CUDA=1 NANWATCH_REQUIRE_EXT=1 PYTHONUNBUFFERED=1 PYTHONPATH=$PWD/python
{ nvidia-smi; nvcc --version; $PYTHON -c 'import sys, torch; print(sys.version, torch.__version__, torch.version.cuda)'
  git log -1 --format=%H 2>/dev/null; } >"$RESULTS/machine.txt" 2>&1

failed=()
for part in "${PARTS[@]}"; do
  IFS='|' read -r name limit command <<<"$part"
  if [ $# -gt 0 ]; then
    [[ " $* " == *" $name "* ]] || continue
  elif [ "$(cut -d' ' -f1 "$RESULTS/$name.status" 2>/dev/null)" = 0 ]; then
    # A build is of this machine, and another one may be at hand by now.
    [ "$name" = build ] && compgen -G "python/nanwatch/_C*.so" >/dev/null && continue
    [ "$name" != build ] && continue
  fi
  command=${command//RESULTS/$RESULTS}
  echo "== $name, at most $limit s: $command"
  begun=$SECONDS
  timeout --kill-after=10 "$limit" $command >"$RESULTS/$name.log" 2>&1
  status=$?
  echo "$status after $((SECONDS - begun)) s" >"$RESULTS/$name.status"
  echo "   status $status after $((SECONDS - begun)) s; $RESULTS/$name.log ends with:"
  tail -n 5 "$RESULTS/$name.log" | cut -c1-200 | sed 's/^/   /'
  [ $status = 0 ] || failed+=("$name")
  [ "$name" = build ] && [ $status != 0 ] && break # nothing else can run
done
[ ${#failed[@]} = 0 ] || { echo "failed: ${failed[*]}" >&2; exit 1; }
