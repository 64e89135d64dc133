#!/bin/sh
# On a machine with a GPU: build the library for it, then tests, sanitizers and benchmarks. OUT is where the full output
# goes (default: a new temporary folder); a short table comes last.
#
#   ci/device.sh [build] [test] [facade] [sanitize] [bench] [rows] [ceiling]     all when none is named
#
# The steps facade and bench are those of the Python package. They need cffi, and bench what the extra cli has, as do the
# tests of its commands; they are left out where that is missing and they are not named.
set -u
cd "$(dirname "$0")/.."
OUT=${OUT:-$(mktemp -d)}
BUILD=${KVBM_DEVICE_BUILD:-$(mktemp -d)}
has() { python3 -c "import $1" 2>/dev/null; }
STEPS=${*:-build test $(has cffi && echo facade) sanitize $(has cffi,click,rich && echo bench) rows ceiling}
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
    flags=
    case $file in *_avx2.cpp) flags='-mavx2 -mf16c' ;; esac
    g++ -std=c++17 -O3 -fPIC -fvisibility=hidden -fno-exceptions $flags -Iinclude -Inative -c "$file" \
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

# The C API's tests need no package.
c_tests() {
  # shellcheck disable=SC2046
  KVBM_REQUIRE_GPU=1 timeout 240 python3 -m pytest -q -W default --maxfail=10 --durations=8 -p no:cacheprovider \
    $(ls tests/test_gpu_*.py | grep -v -e facade -e cli -e kvbench)
}

# The package as a build would lay it out, for what comes after in the same subshell.
use_package() {
  site=$BUILD/site
  rm -rf "$site"
  mkdir -p "$site"
  cp -r python/kvbm_kernels "$site/"
  mkdir -p "$site/kvbm_kernels/include" "$site/kvbm_kernels/_lib"
  cp include/kvbm_kernels.h "$site/kvbm_kernels/include/"
  cp "$KVBM_GPU_LIBRARY" "$site/kvbm_kernels/_lib/"
  unset KVBM_KERNELS_LIBRARY
  export PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
}

# On arrays of the GPU and on all that it does for host memory; and its commands.
facade() (
  use_package
  export KVBM_REQUIRE_GPU=1
  # Else JAX takes most of the GPU's memory for itself.
  export XLA_PYTHON_CLIENT_PREALLOCATE=false
  status=0
  timeout 400 python3 -m pytest -q -rs -W default --maxfail=10 --durations=8 -p no:cacheprovider \
    tests/test_gpu_facade*.py tests/test_kv_device*.py || status=1
  has click,rich && { timeout 240 python3 -m pytest -q -rs -W default --maxfail=10 --durations=8 -p no:cacheprovider \
    tests/test_gpu_cli.py tests/test_gpu_kvbench.py || status=1; }
  JAX_PLATFORMS=cpu timeout 240 python3 -m pytest -q -W default --maxfail=10 -p no:cacheprovider tests/test_lifetime.py \
    tests/test_copy_blocks.py tests/test_batch.py tests/test_convert.py tests/test_c_api.py tests/test_c_views.py \
    tests/test_c_explain.py tests/test_arrays.py tests/test_streams.py || status=1
  return $status
)

# All suites: $OUT/bench.json has everything, and what is shown of it is the table.
bench() (
  use_package
  cd "$OUT" || return
  timeout 330 python3 -m kvbm_kernels.bench --suite all --warmup 4 --iters 36 --json bench.json
  status=$?
  python3 -m kvbm_kernels.bench show bench.json >bench-table.txt
  return $status
)

sanitize() {
  status=0
  # The failing allocation in there is on purpose.
  for tool in 'memcheck --report-api-errors no' racecheck; do
    # shellcheck disable=SC2086
    timeout 150 compute-sanitizer --tool $tool --error-exitcode 9 --print-limit 5 "$BUILD/gpu_check" || status=1
  done
  return $status
}

# What bounds the benchmarks: kernels that only copy.
ceiling() {
  nvcc -std=c++17 -O3 -arch=native -Iinclude -Inative bench/ceiling/ceiling.cu "$KVBM_GPU_LIBRARY" -o "$BUILD/ceiling" &&
    LD_LIBRARY_PATH="$BUILD${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}" timeout 120 "$BUILD/ceiling"
}

build() {
  step build build_library "$KVBM_GPU_LIBRARY" -Xptxas -v
  [ -f "$KVBM_GPU_LIBRARY" ] || { echo "no library"; exit 1; }
}

export KVBM_GPU_LIBRARY="$BUILD/libkvbm_kernels.so"
for wanted in $STEPS; do
  case $wanted in
    build | test | facade | sanitize | bench | rows | ceiling) ;;
    *) echo "there is no step $wanted: build, test, facade, sanitize, bench, rows, ceiling" >&2 && exit 2 ;;
  esac
done
nvidia-smi --query-gpu=name,driver_version,clocks.sm --format=csv,noheader || { echo "there is no GPU" >&2; exit 2; }
for wanted in $STEPS; do
  # Each of the others needs it.
  [ "$wanted" = build ] || [ -f "$KVBM_GPU_LIBRARY" ] || build
  case $wanted in
    build) build ;;
    test) step test c_tests ;;
    facade) step facade facade ;;
    sanitize)
      step native native
      step sanitize sanitize
      ;;
    bench) step bench bench ;;
    rows) step rows env PYTHONUNBUFFERED=1 timeout 200 python3 bench/gpu_rows.py --json "$OUT/rows.json" ;;
    ceiling) step ceiling ceiling ;;
  esac
done
for file in "$OUT"/test.txt "$OUT"/facade.txt "$OUT"/native.txt "$OUT"/sanitize.txt; do
  [ -f "$file" ] && echo "-- $(basename "$file" .txt)" && tail -n 3 "$file"
done
for file in "$OUT"/bench-table.txt "$OUT"/rows.txt "$OUT"/ceiling.txt; do
  [ -f "$file" ] && echo "-- $(basename "$file" .txt)" && cat "$file"
done
[ -z "$failed" ] && echo "all steps passed" || { echo "FAILED:$failed"; exit 1; }
