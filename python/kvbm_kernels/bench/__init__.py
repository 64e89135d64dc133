"""kvbench: what conversions and transfers of KV blocks cost on this machine.

Run it as ``kvbench`` or ``python -m kvbm_kernels.bench``; it needs the extra ``cli``. docs/kvbench.md explains it.
"""
