# Sourced by the scripts beside it. They run in the project's root and keep all they make in build/ci.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
work=$PWD/build/ci
unset KVBM_KERNELS_LIBRARY
mkdir -p "$work"

step() { printf '\n== %s (%d:%02d)\n' "$1" $((SECONDS / 60)) $((SECONDS % 60)); }

# A virtual environment of its own, first on PATH from here on.
use_venv() {
  # Before it is made: it is kept for the next run.
  "${PYTHON:-python3}" -c 'import sys; sys.version_info >= (3, 10) or sys.exit("kvbm_kernels needs Python 3.10 or newer")'
  if [[ ! -x $work/$1/bin/pip ]]; then
    "${PYTHON:-python3}" -m venv "$work/$1"
  fi
  export PATH=$work/$1/bin:$PATH
}

# Whether the build would find a CUDA toolkit, or has to.
wants_cuda() {
  [[ -n ${CUDA_PATH:-}${CUDA_HOME:-} || ${KVBM_REQUIRE_CUDA:-0} != 0 ]] || command -v nvcc >/dev/null
}

# For a subshell: makes this machine one without CUDA. A folder on PATH with an nvcc in it is replaced by links to
# everything else there.
hide_nvcc() {
  unset CUDA_PATH CUDA_HOME KVBM_REQUIRE_CUDA
  local folder links path='' IFS=:
  for folder in $PATH; do
    if [[ -x $folder/nvcc ]]; then
      links=$work/without-nvcc/$folder
      mkdir -p "$links"
      find "$folder/" -mindepth 1 -maxdepth 1 ! -name nvcc -exec ln -sfnt "$links" {} +
      folder=$links
    fi
    path+=${path:+:}$folder
  done
  export PATH=$path
}

# native_build FOLDER [meson options]: a fresh native build and its unit tests.
native_build() {
  local build=$work/$1
  shift
  rm -rf "$build"
  meson setup "$build" --werror "$@"
  meson compile -C "$build"
  meson test -C "$build" --print-errorlogs
}
