#!/usr/bin/env bash
# Everything that can be checked on this machine, from nothing: lint, the build without CUDA, the kernels on an emulated
# GPU, the build with CUDA where there is an nvcc, and all of it under AddressSanitizer and UndefinedBehaviorSanitizer.
#
# Needs a C and C++ compiler, Python 3.10 or newer with venv, and access to a Python package index.
source "$(dirname "$0")/lib.sh"

step 'Set up'
use_venv venv
# As a user would, on a machine without CUDA.
(hide_nvcc; pip install --quiet '.[cli,lint,test]')
# The tests with a real model need these two.
pip install --quiet torch==2.13.0 transformers

step 'Lint'
ruff check
ruff format --check
mypy
find include native tests bench -regex '.*\.\(c\|h\|cpp\|cu\|cuh\)' -exec clang-format --dry-run --Werror {} +

# The sanitizer has to be there before Python, and the C++ runtime before the sanitizer looks for it. Python itself
# does not free everything at exit. Left out is what does not use this library, and what uses it in processes or models
# whose other tests are the same calls and a hundredfold faster.
sanitized() {
  native_build sanitized -Dcuda=disabled -Dbuildtype=debugoptimized -Db_sanitize=address,undefined
  local runtime ignored=() file
  runtime=$("${CXX:-c++}" -print-file-name=libasan.so)
  runtime+=" $("${CXX:-c++}" -print-file-name=libstdc++.so)"
  for file in build capi_programs 'cli*' engines_transformers examples exports host_bench kernels 'kvbench*' 'llama*' models \
    package; do
    ignored+=("--ignore-glob=tests/test_$file.py")
  done
  ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 \
    LD_PRELOAD=$runtime KVBM_KERNELS_LIBRARY=$work/sanitized/native/libkvbm_kernels.so pytest -q -rs "${ignored[@]}"
}

step 'Without CUDA: build'
(hide_nvcc; native_build stub)
# Beside the rest, which leaves a processor idle.
sanitized >"$work/sanitized.log" 2>&1 &
sanitizers=$!
trap 'kill $(jobs -p) 2>/dev/null || true' EXIT
step 'Without CUDA: tests'
(hide_nvcc; pytest -q -rs)

step 'Emulated GPU: tests'
# Twice at a time: a grid runs on one processor.
on_emulated_gpu() {
  KVBM_REQUIRE_GPU=1 OMP_NUM_THREADS=1 KVBM_KERNELS_LIBRARY=$work/stub/tests/native/emulated/libkvbm_emulated.so \
    pytest -q -rs "$@"
}
on_emulated_gpu tests/test_gpu_{convert,models,pairs}.py &
on_emulated_gpu tests/test_gpu_{emulated,facade_engines,rows,sized}.py
wait $!

if wants_cuda; then
  step 'With CUDA: build'
  # For a look at the machine code; toolkits do not all have them.
  pip install --quiet nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm
  native_build cuda -Dcuda=enabled
  step 'With CUDA: tests'
  KVBM_REQUIRE_CUDA=1 KVBM_KERNELS_LIBRARY=$work/cuda/native/libkvbm_kernels.so pytest -q -rs
else
  step 'With CUDA: left out, there is no nvcc'
fi

step 'Sanitizers'
wait "$sanitizers" || { cat "$work/sanitized.log"; exit 1; }
tail -n 3 "$work/sanitized.log"

step 'All passed'
