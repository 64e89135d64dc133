#!/usr/bin/env bash
# The library's main job, shown: installs the package and takes KV blocks to another tensor-parallel size and back.
source "$(dirname "$0")/lib.sh"
step 'Build and install'
use_venv demo-venv
pip install --quiet .
step 'Blocks to another tensor-parallel size and back'
python examples/reshard.py "$@"
