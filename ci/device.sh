#!/bin/sh
# On a machine with a GPU: build the library for it, then tests, sanitizers and benchmarks. OUT is where the full output
# goes (default: a new temporary folder); a short table comes last.
#
#   ci/device.sh [build] [test] [sanitize] [bench] [variants]     all but variants when none is named
set -u
cd "$(dirname "$0")/.."
OUT=${OUT:-$(mktemp -d)}
BUILD=${KVBM_DEVICE_BUILD:-$(mktemp -d)}
STEPS=${*:-build test sanitize bench}
ARCHS=${CUDA_ARCHS:-90}
failed=

# build_library FILE [nvcc flags]: the shared library, by the compilers alone.
build_library() {
  library=$1
  shift
  objects=$library.objects
  mkdir -p "$objects"
  gencode=
  for arch in $(echo "$ARCHS" | tr , ' '); do gencode="$gencode -gencode arch=compute_$arch,code=sm_$arch"; done
  for file in native/*.cpp native/host/*.cpp; do
    [ "$file" = native/stub.cpp ] && continue
    g++ -std=c++17 -O3 -fPIC -fvisibility=hidden -fno-exceptions -Iinclude -Inative -c "$file" \
      -o "$objects/$(basename "$file").o" &
  done
  for file in native/cuda/*.cu; do
    # shellcheck disable=SC2086
    nvcc -std=c++17 -O3 -lineinfo -Xcompiler=-fPIC,-fvisibility=hidden,-fno-exceptions $gencode "$@" \
      "-DKVBM_CUDA_ARCHS=\"$ARCHS\"" -Iinclude -Inative -c "$file" -o "$objects/$(basename "$file").o" &
  done
  wait
  g++ -shared -Wl,--version-script=native/kvbm_kernels.map -o "$library" "$objects"/*.o \
    -L"$(nvcc_root)/lib64" -lcudart_static -lpthread -ldl -lrt
}

# The toolkit's folder; nvcc on PATH may be a wrapper somewhere else.
nvcc_root() {
  nvcc --dryrun -x cu /dev/null -c -o /dev/null 2>&1 | sed -n 's/^#\$ TOP=//p'
}

step() {
  name=$1
  shift
  echo "== $name"
  if ! "$@" >"$OUT/$name.txt" 2>&1; then
    failed="$failed $name"
    tail -n 40 "$OUT/$name.txt"
  fi
}

# The engine's objects beside a program of ours share one CUDA runtime with it.
native() {
  g++ -std=c++17 -O1 -g -Iinclude -I"$(nvcc_root)/include" tests/native/gpu_check.cpp "$KVBM_GPU_LIBRARY.objects"/*.o \
    -o "$BUILD/gpu_check" -L"$(nvcc_root)/lib64" -lcudart_static -lpthread -ldl -lrt || return
  # What a freed pointer does is CUDA's to say; it is shown, not judged.
  "$BUILD/gpu_check" freed
  echo "exit status $?"
  "$BUILD/gpu_check"
}

sanitize() {
  status=0
  # The failing allocation in there is on purpose.
  for tool in 'memcheck --report-api-errors no' racecheck; do
    # shellcheck disable=SC2086
    timeout 150 compute-sanitizer --tool $tool --error-exitcode 9 --print-limit 5 "$BUILD/gpu_check" || status=1
  done
  return $status
}

export KVBM_GPU_LIBRARY="$BUILD/libkvbm_kernels.so"
nvidia-smi --query-gpu=name,driver_version,clocks.sm --format=csv,noheader
for wanted in $STEPS; do
  case $wanted in
    build)
      step build build_library "$KVBM_GPU_LIBRARY" -Xptxas -v
      [ -f "$KVBM_GPU_LIBRARY" ] || { echo "no library"; exit 1; }
      ;;
    test)
      step test env KVBM_REQUIRE_GPU=1 timeout 240 python3 -m pytest -q -W default --maxfail=10 --durations=8 \
        -p no:cacheprovider tests/test_gpu_*.py
      ;;
    sanitize)
      step native native
      step sanitize sanitize
      ;;
    bench) step bench env PYTHONUNBUFFERED=1 timeout 330 python3 bench/gpu_bench.py --json "$OUT/bench.json" ;;
    variants)
      # Each line: a name, then the nvcc flags that make it.
      while read -r name flags; do
        [ -n "$name" ] || continue
        # shellcheck disable=SC2086
        build_library "$BUILD/$name.so" $flags >"$BUILD/$name.build.txt" 2>&1
        # shellcheck disable=SC2086
        step "variant_$name" env KVBM_GPU_LIBRARY="$BUILD/$name.so" timeout 150 python3 bench/gpu_bench.py --short ${KVBM_VARIANT_ARGS:-}
      done <<VARIANTS
${KVBM_VARIANTS:-}
VARIANTS
      ;;
  esac
done
for file in "$OUT"/test.txt "$OUT"/native.txt "$OUT"/sanitize.txt; do
  [ -f "$file" ] && echo "-- $(basename "$file" .txt)" && tail -n 3 "$file"
done
for file in "$OUT"/variant_*.txt "$OUT"/bench.txt; do
  [ -f "$file" ] && echo "-- $(basename "$file" .txt)" && cat "$file"
done
[ -z "$failed" ] && echo "all steps passed" || { echo "FAILED:$failed"; exit 1; }
