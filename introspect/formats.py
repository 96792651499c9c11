"""How weights are stored in few bits, as data: data/formats.json, and the tensors a matrix becomes in such a format.

A matrix is [N, K]: N outputs (rows), K inputs (columns). A scale, and where there is one a zero point, stands for a
block of `scale_block` rows x columns (0: all of them), or for `flat_block` weights in storage order. Packed weights lie
in words (several to a byte, or to an int32 along one dimension), the last word of a line padded. Shapes are those of
the tensors that the format's own library writes.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from functools import cache
from importlib.resources import files
from math import prod
from typing import Any, Literal

from introspect.strict_json import parse_object
from introspect.units import DTYPE_BITS, tensor_bytes

Role = Literal["packed", "scale", "zero", "index", "extra"]


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a stored matrix: what it is for, its shape (experts stacked in front) and dtype."""

    role: Role
    shape: tuple[int, ...]
    dtype: str

    @property
    def bytes(self) -> int:
        """Bytes it takes."""
        return tensor_bytes(self.shape, self.dtype)


@dataclass(frozen=True, slots=True)
class Matrix:
    """`count` matrices [rows, columns] of equal size, each stored on its own: N outputs, K inputs."""

    rows: int
    columns: int
    count: int = 1

    @property
    def elements(self) -> int:
        """Weights in all of them."""
        return self.count * self.rows * self.columns


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """A way to store weights. `compute`: the type its products run in where a GPU has it; None: the model's own.

    `element`: dtype of a weight that is stored whole; `word`: what several weights are packed into, along
    `packed_along`; `transposed`: tensors are [K, N]. `zero`: dtype of a zero point, or "packed" like the weights, along
    the rows. `index`: dtype of an entry for each column.
    `second_block` scales share one `second_scale`. `extra`: elements per matrix by dtype (tables, global scales).
    """

    bits: int
    element: str | None = None
    word: str = "uint8"
    packed_along: Literal["rows", "columns"] = "columns"
    transposed: bool = False
    scale_block: tuple[int, int] | None = None
    flat_block: int | None = None
    scale: str | None = None
    zero: str | None = None
    index: str | None = None
    second_block: int | None = None
    second_scale: str | None = None
    extra: dict[str, int] = field(default_factory=dict)
    compute: str | None = None
    about: str = ""
    source: str = ""

    @property
    def is_dense(self) -> bool:
        """Whether a weight is stored as it is, without any scale."""
        return self.scale is None

    def tensors(self, matrix: Matrix) -> tuple[StoredTensor, ...]:
        """What the library of this format stores for a matrix."""
        found = [self._packed(matrix)]
        if self.scale is not None:
            found += self._scales(matrix)
        if self.index is not None:
            found.append(StoredTensor("index", (matrix.count, matrix.columns), self.index))
        found += [StoredTensor("extra", (matrix.count, number), dtype) for dtype, number in self.extra.items()]
        return tuple(found)

    def _packed(self, matrix: Matrix) -> StoredTensor:
        if self.flat_block is not None and self.element is None:
            return StoredTensor("packed", (matrix.count, self._words(matrix.rows * matrix.columns)), self.word)
        if self.element is not None:
            return self._laid_out("packed", matrix, (matrix.rows, matrix.columns), self.element)
        if self.packed_along == "columns":
            return self._laid_out("packed", matrix, (matrix.rows, self._words(matrix.columns)), self.word)
        return self._laid_out("packed", matrix, (self._words(matrix.rows), matrix.columns), self.word)

    def _scales(self, matrix: Matrix) -> list[StoredTensor]:
        assert self.scale is not None
        blocks = self._blocks(matrix)
        found = [self._laid_out("scale", matrix, blocks, self.scale)]
        if self.second_scale is not None and self.second_block is not None:
            groups = -(-prod(blocks) // self.second_block)
            found.append(StoredTensor("scale", (matrix.count, groups), self.second_scale))
        if self.zero == "packed":
            found.append(self._laid_out("zero", matrix, (self._words(blocks[0]), *blocks[1:]), self.word))
        elif self.zero is not None:
            found.append(self._laid_out("zero", matrix, blocks, self.zero))
        return found

    def _laid_out(self, role: Role, matrix: Matrix, shape: tuple[int, ...], dtype: str) -> StoredTensor:
        return StoredTensor(role, (matrix.count, *(reversed(shape) if self.transposed else shape)), dtype)

    def _blocks(self, matrix: Matrix) -> tuple[int, ...]:
        """Number of scales, by dimension."""
        if self.flat_block is not None:
            return (-(-matrix.rows * matrix.columns // self.flat_block),)
        assert self.scale_block is not None
        rows, columns = self.scale_block
        return (-(-matrix.rows // rows) if rows else 1, -(-matrix.columns // columns) if columns else 1)

    def _words(self, weights: int) -> int:
        return -(-weights * self.bits // DTYPE_BITS[self.word])


@cache
def load_formats() -> dict[str, Format]:
    """The built-in formats by name, in the order of the file."""
    rows: dict[str, dict[str, Any]] = _data()["formats"]
    return {name: format_of(row) for name, row in rows.items()}


@cache
def load_recipes() -> tuple[dict[str, str], ...]:
    """Ways to use a format in computation: what is multiplied in which type."""
    return tuple(_data()["recipes"])


def format_of(row: dict[str, Any]) -> Format:
    """A format from its fields. A field that is none, a dtype that is none and a block that is no pair are refused."""
    known = {member.name for member in fields(Format)}
    if unknown := sorted(row.keys() - known):
        raise ValueError(f"unknown field {unknown[0]!r} of a format, expected some of {', '.join(sorted(known))}")
    dtypes = [row.get(name) for name in ("element", "word", "scale", "index", "second_scale")]
    dtypes += [*row.get("extra", {}), *([row["zero"]] if row.get("zero") != "packed" and "zero" in row else [])]
    if strange := [dtype for dtype in dtypes if dtype is not None and dtype not in DTYPE_BITS]:
        raise ValueError(f"unknown dtype {strange[0]!r} of a format, expected some of {', '.join(DTYPE_BITS)}")
    blocked = row.get("scale_block") is not None or row.get("flat_block") is not None
    if (row.get("scale") is not None) != blocked:
        raise ValueError("a format has a scale and a block for it, or neither")
    block = row.get("scale_block")
    return Format(**{**row, **({} if block is None else {"scale_block": (block[0], block[1])})})


def _data() -> dict[str, Any]:
    return parse_object(files("introspect").joinpath("data/formats.json").read_bytes())
