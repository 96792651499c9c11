"""A model's weights in a format: which matrices are quantised, and what everything then takes.

Quantised are the matrices in layers that products multiply by: attention (any token mixer), FFN and experts. The rest
stays as the model has it: embedding, head, norms, biases, routers, convolutions, and what --keep names.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from math import prod

from introspect.analyzers._components import Components, Placed
from introspect.analyzers._labels import Labels
from introspect.analyzers._roofline import Machine, Work
from introspect.analyzers._structure import Structure
from introspect.formats import Format, Matrix, StoredTensor
from introspect.native_record import NativeFormat
from introspect.records import Parameter

_PARTS = ("attention", "ffn")
_PRODUCTS = ("linear", "grouped", "einsum")


@dataclass(frozen=True, slots=True)
class Quantisable:
    """A parameter that is a matrix (or a stack of them) that products multiply by."""

    placed: Placed
    matrix: Matrix

    @property
    def path(self) -> str:
        """The parameter's path."""
        return self.placed.parameter.path


def quantisable(structure: Structure) -> tuple[Quantisable, ...]:
    """Every matrix that a format may be applied to, in definition order."""
    shapes: dict[str, tuple[int, int]] = {}
    for i, paths in structure.matrices.items():
        for gemm in structure.graph.ops[i].gemms:
            if gemm.kind in _PRODUCTS:
                shapes.update((path, (gemm.n, gemm.k)) for path in paths)
    found = []
    for one in Components(Labels(structure)).placed():
        parameter = one.parameter
        in_layer = structure.layers.layer_path(parameter.path) is not None
        if parameter.path in shapes and one.component in _PARTS and in_layer and not one.bias:
            found.append(Quantisable(one, _matrix(parameter.shape, *shapes[parameter.path])))
    return tuple(found)


def _matrix(shape: tuple[int, ...], n: int, k: int) -> Matrix:
    """The parameter as matrices [n, k]; as its own last two dimensions where products multiply by parts of it."""
    count = prod(shape)
    if count % (n * k) == 0:
        return Matrix(rows=n, columns=k, count=count // (n * k))
    rows, columns = shape[-2:]
    return Matrix(rows=rows, columns=columns, count=count // (rows * columns))


def kept(one: Quantisable, patterns: Iterable[str]) -> bool:
    """Whether --keep names this parameter."""
    return any(names(pattern, one.path) for pattern in patterns)


def names(pattern: str, path: str) -> bool:
    """Whether the pattern matches a parameter's path, with or without its last part (".weight")."""
    return fnmatch(path, pattern) or fnmatch(path.rpartition(".")[0], pattern)


@dataclass(frozen=True, slots=True)
class Stored:
    """What one parameter takes when quantised."""

    dense_bytes: int
    packed_bytes: int
    scale_bytes: int
    elements: int
    compute: str | None

    @property
    def bytes(self) -> int:
        """Packed weights and everything beside them."""
        return self.packed_bytes + self.scale_bytes


@dataclass(frozen=True, slots=True)
class Quantised:
    """All weights in one format: the quantised parameters by path, and the bytes of all others."""

    name: str
    stored: dict[str, Stored]
    kept_bytes: int

    @property
    def packed_bytes(self) -> int:
        """Bytes of the packed weights."""
        return sum(one.packed_bytes for one in self.stored.values())

    @property
    def scale_bytes(self) -> int:
        """Bytes of scales, zero points, indices and tables."""
        return sum(one.scale_bytes for one in self.stored.values())

    @property
    def weight_bytes(self) -> int:
        """Bytes of everything."""
        return self.packed_bytes + self.scale_bytes + self.kept_bytes

    @property
    def params(self) -> int:
        """Quantised weights, logically."""
        return sum(one.elements for one in self.stored.values())

    def compute(self, machine: Machine) -> str | None:
        """The types its products run in on this GPU, "+" between several; None where all run in the model's own."""
        found = {one.compute for one in self.stored.values() if one.compute and machine.gpu.peak(one.compute)}
        return "+".join(sorted(found)) or None

    @property
    def bits_per_weight(self) -> float | None:
        """Bits of a quantised weight with its share of the scales; None when nothing is quantised."""
        return 8 * (self.packed_bytes + self.scale_bytes) / self.params if self.params else None

    def works(self, works: Iterable[Work], machine: Machine) -> tuple[Work, ...]:
        """A step's work with these weights: fewer bytes, and products in the format's type where the GPU has it."""
        return tuple(self._work(work, machine) for work in works)

    def _work(self, work: Work, machine: Machine) -> Work:
        stored = [self.stored.get(path) for path in work.weights]
        known = [one for one in stored if one is not None]
        if not known or len(known) != len(stored):
            return work
        share = sum(one.bytes for one in known) / sum(one.dense_bytes for one in known)
        compute = known[0].compute
        return replace(
            work,
            weight_bytes=work.weight_bytes * share,
            expert_bytes=work.expert_bytes * share,
            dtype=compute if compute is not None and machine.gpu.peak(compute) else work.dtype,
        )


def in_format(
    name: str, format: Format, matrices: Iterable[Quantisable], structure: Structure, keep: Iterable[str] = ()
) -> Quantised:
    """All weights with the matrices in `format`, but for those that `keep` names."""
    patterns = tuple(keep)
    stored = {}
    for one in matrices:
        if not format.is_dense and not kept(one, patterns):
            stored[one.path] = _stored(
                format.tensors(one.matrix), one.placed.parameter.bytes, one.matrix, format.compute
            )
    return Quantised(name, stored, _bytes_outside(structure, stored))


def natively(native: NativeFormat, structure: Structure) -> Quantised:
    """All weights as the checkpoint stores them."""
    sizes = {p.path: p for p in _parameters(structure)}
    stored = {
        one.parameter: _stored(
            one.tensors, sizes[one.parameter].bytes, Matrix(1, sizes[one.parameter].count), one.compute
        )
        for one in native.parameters
        if one.parameter in sizes
    }
    return Quantised("native", stored, _bytes_outside(structure, stored))


def _stored(tensors: Iterable[StoredTensor], dense: int, matrix: Matrix, compute: str | None) -> Stored:
    found = tuple(tensors)
    packed = sum(tensor.bytes for tensor in found if tensor.role == "packed")
    return Stored(dense, packed, sum(tensor.bytes for tensor in found) - packed, matrix.elements, compute)


def _parameters(structure: Structure) -> list[Parameter]:
    return [p for p in structure.graph.trace.parameters if not p.buffer and p.tied_to is None]


def _bytes_outside(structure: Structure, stored: dict[str, Stored]) -> int:
    return sum(p.bytes for p in _parameters(structure) if p.path not in stored)
