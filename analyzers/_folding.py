"""Equal layers as one row: `*` in a module path, and which layers it stands for.

A layer is a numbered child of a container whose children hold modules of their own (`model.layers.5`,
`encoder.blocks.2`); `mlp.0` of a plain Sequential of leaves is none.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

Layer = tuple[int, ...]  # numbers of the nested containers, outermost first; () outside any layer


class LayerPaths:
    """Splits module and parameter paths of one model into a pattern and layer numbers."""

    def __init__(self, modules: Iterable[str]) -> None:
        paths = list(modules)
        parents = {path.rpartition(".")[0] for path in paths}
        self._layers = {path for path in paths if path.rpartition(".")[2].isdigit() and path in parents}
        self._known: dict[str, tuple[str, Layer]] = {}

    def split(self, path: str) -> tuple[str, Layer]:
        """("model.layers.*.mlp.gate_proj", (5,)) for "model.layers.5.mlp.gate_proj"."""
        found = self._known.get(path)
        if found is None:
            found = self._known[path] = self._split(path)
        return found

    def _split(self, path: str) -> tuple[str, Layer]:
        parts, numbers, prefix = [], [], ""
        for part in path.split("."):
            prefix = f"{prefix}.{part}" if prefix else part
            if prefix in self._layers:
                numbers.append(int(part))
                part = "*"
            parts.append(part)
        return ".".join(parts), tuple(numbers)

    def layer_path(self, path: str) -> str | None:
        """The path of the outermost layer this path lies in ("model.layers.5"); None outside any."""
        prefix = ""
        for part in path.split("."):
            prefix = f"{prefix}.{part}" if prefix else part
            if prefix in self._layers:
                return prefix
        return None


def layer_ranges(layers: Iterable[Layer]) -> str:
    """Outermost numbers as ranges: "0-31", "0-2", "0-24:2" (every second one), "0,3-5"; "" outside any layer."""
    numbers = sorted({layer[0] for layer in layers if layer})
    if not numbers:
        return ""
    steps = {b - a for a, b in pairwise(numbers)}
    if len(numbers) > 2 and len(steps) == 1 and (step := steps.pop()) > 1:
        return f"{numbers[0]}-{numbers[-1]}:{step}"
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
