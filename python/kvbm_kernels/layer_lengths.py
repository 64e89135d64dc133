"""How many tokens each layer of a cache has."""

from __future__ import annotations

from kvbm_kernels._wording import counted
from kvbm_kernels.errors import KvbmValueError, Uncopied


class LayerLengths(Uncopied):
    """As many in all layers, but for those that are ahead of the others in a step that goes layer by layer."""

    __slots__ = ("_ahead", "num_layers", "shortest")

    def __init__(self, num_layers: int) -> None:
        self.num_layers = num_layers
        self.shortest = 0
        """Tokens in all layers."""
        # The lengths of layers that have more.
        self._ahead: dict[int, int] = {}

    def __getitem__(self, layer: int) -> int:
        return self._ahead.get(layer, self.shortest)

    def to_list(self) -> list[int]:
        return [self[layer] for layer in range(self.num_layers)]

    @property
    def longest(self) -> int:
        return max(self._ahead.values()) if self._ahead else self.shortest

    def set(self, layers: tuple[int, int], n: int) -> None:
        """All layers have n tokens, or one has that is to have more than before."""
        first, stop = layers
        if stop - first == self.num_layers:
            self._ahead.clear()
            self.shortest = n
            return
        self._ahead[first] = n
        if len(self._ahead) == self.num_layers:
            self.shortest = min(self._ahead.values())
            self._ahead = {layer: length for layer, length in self._ahead.items() if length > self.shortest}

    def even(self, what: str) -> int:
        """The length, if all layers have it. Raises KvbmValueError, with what wants it in front."""
        if self._ahead:
            behind = next(layer for layer in range(self.num_layers) if layer not in self._ahead)
            ahead, longest = max(self._ahead.items(), key=lambda each: each[1])
            raise KvbmValueError(
                f"{what}: layer {behind} has {counted(self.shortest, 'token')} and layer {ahead} {longest}, "
                "expected as many in all: append to the layers that are behind, or truncate"
            )
        return self.shortest
