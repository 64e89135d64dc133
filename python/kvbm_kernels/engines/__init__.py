"""From the tensors of inference engines to views of their blocks, in one line each."""

from kvbm_kernels.engines.groups import LayerGroups, layer_groups

__all__ = ["LayerGroups", "layer_groups"]
