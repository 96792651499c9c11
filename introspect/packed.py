"""Quantised layouts, told from what is stored: which matrix several tensors stand for, and whether their shapes agree.

Only the parts' names, dtypes and shapes are used. N rows, K columns of the matrix [N, K], b bits, G groups along K:

GPTQ                 qweight int32 [K*b/32, N], qzeros int32 [G, N*b/32], scales [G, N], g_idx [K]
AWQ                  qweight int32 [K, N*b/32], qzeros int32 [G, N*b/32], scales [G, N]
compressed-tensors   weight_packed int32 [N, K*b/32], weight_scale [N, G], weight_zero_point int32 [N*b/32, G]
NVFP4                weight_packed or weight uint8 [N, K/2], weight_scale fp8 [N, K/16], a global scale
fp8                  weight fp8 [N, K], weight_scale_inv [ceil(N/rows), ceil(K/columns)] or a scale of 1 or N values
bitsandbytes 4-bit   weight uint8 [N*K/2, 1], absmax one per block, quant_state; the header does not say N and K
bitsandbytes 8-bit   weight int8 [N, K], SCB [N]
MXFP4                *_blocks uint8 [E, N, K/32, 16], *_scales uint8 [E, N, K/32]; the experts' matrices are [E, K, N]
MLX                  weight uint32 [N, K*b/32], scales and biases [N, G]

A part that is not stored, or does not fit, is said; what the parts leave open (b without zero points) stays None.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod

from introspect.checkpoint import Checkpoint

Stored = Mapping[str, "Part"]


@dataclass(frozen=True, slots=True)
class Part:
    """dtype (as written in the header) and shape of a stored tensor; both None where only its name is known."""

    dtype: str | None
    shape: tuple[int, ...] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """One quantised matrix. `parameter`: the name its dense tensor would have. `parts`: the tensors stored for it.

    `shape`: of the dense tensor, None where the parts do not tell; `elements` may be known all the same. `grouping`:
    what shares a scale, in words. `lost`: parts of the layout that are not stored. `problem`: shapes that disagree.
    """

    scheme: str
    parameter: str
    parts: tuple[str, ...]
    bits: int | None = None
    shape: tuple[int, ...] | None = None
    elements: int | None = None
    grouping: str = ""
    lost: tuple[str, ...] = ()
    problem: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Facts:
    """What the shapes of all parts tell. `words`: (N, 32-bit words of one row), where the number of bits is open."""

    scheme: str = ""
    bits: int | None = None
    shape: tuple[int, ...] | None = None
    elements: int | None = None
    grouping: str = ""
    problem: str | None = None
    words: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layout:
    """How a matrix is told: `main` is the suffix of its packed tensor, `needs` and `may` those of the other parts.

    `dense`: what stands in place of `main` in the name of the dense tensor. `marks`: one of these parts must be stored,
    else it is another layout. `tells`: a part that no other layout has, so that it tells of a main tensor that lacks.
    """

    scheme: str
    main: str
    dtypes: frozenset[str]
    measure: Callable[[Mapping[str, Part]], _Facts]
    needs: tuple[str, ...] = ()
    may: tuple[str, ...] = ()
    dense: str = "weight"
    marks: tuple[str, ...] = ()
    tells: str = ""


def parts_of(checkpoint: Checkpoint) -> dict[str, Part]:
    """Every tensor of a checkpoint by name. Of an index alone, or of a shard that could not be read, only the names."""
    silent = {unread.file for unread in checkpoint.unread}
    index = checkpoint.index.weight_map if checkpoint.index is not None else {}
    parts = {name: Part(None, None) for name, file in index.items() if checkpoint.kind == "index" or file in silent}
    return parts | {
        tensor.name: Part(tensor.dtype, tensor.shape) for header in checkpoint.headers for tensor in header.tensors
    }


def find_packed(stored: Stored, bits: int | None = None) -> tuple[Packed, ...]:
    """Every quantised matrix among the stored tensors. `bits`: what the config says, for layouts that leave it open."""
    found: list[Packed] = []
    for name in stored:
        for layout in _LAYOUTS:
            if name.endswith(layout.main) and (packed := _match(layout, name, stored, bits)) is not None:
                found.append(packed)
                break
            if layout.tells and name.endswith(layout.tells) and (packed := _headless(layout, name, stored)) is not None:
                found.append(packed)
                break
    return tuple(found)


def _headless(layout: _Layout, name: str, stored: Stored) -> Packed | None:
    """The other parts of a matrix whose packed tensor itself is not stored."""
    prefix = name.removesuffix(layout.tells)
    if not _is_boundary(prefix) or prefix + layout.main in stored:
        return None
    parts = tuple(prefix + suffix for suffix in (*layout.needs, *layout.may) if prefix + suffix in stored)
    lost = (prefix + layout.main,)
    return Packed(scheme=layout.scheme, parameter=prefix + layout.dense, parts=parts, lost=lost)


def _is_boundary(prefix: str) -> bool:
    return not prefix or prefix.endswith((".", "_"))


def _match(layout: _Layout, name: str, stored: Stored, bits: int | None) -> Packed | None:
    part = stored[name]
    if part.dtype is not None and part.dtype not in layout.dtypes:
        return None
    prefix = name.removesuffix(layout.main)
    if not _is_boundary(prefix) and not layout.main.startswith("_"):
        return None
    siblings = {suffix: prefix + suffix for suffix in (*layout.needs, *layout.may) if prefix + suffix in stored}
    if layout.marks and not any(mark in siblings for mark in layout.marks):
        return None
    lost = tuple(prefix + suffix for suffix in layout.needs if suffix not in siblings)
    parts = {layout.main: part} | {suffix: stored[full] for suffix, full in siblings.items()}
    facts = _Facts()
    if not lost and all(one.shape is not None for one in parts.values()):
        try:
            facts = layout.measure(parts)
        except (IndexError, ZeroDivisionError, ValueError):
            facts = _Facts(problem="their numbers of dimensions do not fit this layout")
    if facts.words is not None and bits:  # the parts left the number of bits open, the config names it
        rows, words = facts.words
        facts = _dense((rows, words * 32 // bits), bits, facts.grouping)
    return Packed(
        scheme=facts.scheme or layout.scheme,
        parameter=prefix + layout.dense,
        parts=(name, *siblings.values()),
        bits=facts.bits,
        shape=facts.shape,
        elements=facts.elements,
        grouping=facts.grouping,
        lost=lost,
        problem=facts.problem,
    )


def _dense(shape: tuple[int, ...], bits: int, grouping: str, scheme: str = "") -> _Facts:
    return _Facts(shape=shape, elements=prod(shape), bits=bits, grouping=grouping, scheme=scheme)


def _shape(parts: Mapping[str, Part], suffix: str) -> tuple[int, ...]:
    shape = parts[suffix].shape
    if shape is None:
        raise ValueError(suffix)
    return shape


def _unequal(what: str, found: tuple[int, ...], wanted: tuple[int, ...]) -> _Facts:
    return _Facts(problem=f"{what} is {list(found)}, the other parts ask for {list(wanted)}")


def _measure_gptq_or_awq(parts: Mapping[str, Part]) -> _Facts:
    (rows, columns), (groups, n) = _shape(parts, "qweight"), _shape(parts, "scales")
    zeros = _shape(parts, "qzeros")
    bits, rest = divmod(32 * zeros[1], n)
    if rest or not 1 <= bits <= 16 or zeros[0] != groups:
        return _unequal("qzeros", zeros, (groups, n * 4 // 32))
    k = rows * 32 // bits if columns == n else rows
    if columns not in (n, n * bits // 32):
        return _unequal("qweight", (rows, columns), (rows, n))
    index = parts.get("g_idx")
    if index is not None and index.shape != (k,):
        return _unequal("g_idx", index.shape or (), (k,))
    return _grouped((n, k), bits, groups, "GPTQ" if columns == n else "AWQ")


def _grouped(shape: tuple[int, int], bits: int, groups: int, scheme: str = "") -> _Facts:
    size = -(-shape[1] // groups)
    if shape[1] % groups:
        size = _power_of_two(size)  # the last group is a short one
    if -(-shape[1] // size) != groups:
        return _Facts(problem=f"{groups} groups do not divide {shape[1]} columns")
    return _dense(shape, bits, f"groups of {size}" if groups > 1 else "one scale per row", scheme)


def _measure_compressed(parts: Mapping[str, Part]) -> _Facts:
    (n, words), scale = _shape(parts, "weight_packed"), _shape(parts, "weight_scale")
    if scale[0] != n and scale[1] == words:  # fused experts as engines keep them: K runs down
        return _Facts(words=(words, n), grouping=f"{scale[0]} scales per row")
    if scale[0] != n:
        return _unequal("weight_scale", scale, (n, scale[-1]))
    zeros = parts.get("weight_zero_point")
    if zeros is None or zeros.dtype != "I32" or zeros.shape is None:
        return _Facts(words=(n, words), grouping=f"{scale[1]} scales per row")
    bits, rest = divmod(32 * zeros.shape[0], n)
    if rest or not bits or zeros.shape[1:] != scale[1:]:
        return _unequal("weight_zero_point", zeros.shape, (n * 4 // 32, scale[1]))
    return _grouped((n, words * 32 // bits), bits, scale[1])


def _measure_nvfp4(main: str) -> Callable[[Mapping[str, Part]], _Facts]:
    def measure(parts: Mapping[str, Part]) -> _Facts:
        *outer, half = _shape(parts, main)
        scale = _shape(parts, "weight_scale")
        wanted = (*outer, half * 2 // 16)
        if scale != wanted:
            return _unequal("weight_scale", scale, wanted)
        return _dense((*outer, half * 2), 4, "groups of 16")

    return measure


def _measure_fp8(parts: Mapping[str, Part]) -> _Facts:
    shape = _shape(parts, "weight")
    suffix = next(one for one in ("weight_scale_inv", "weight_scale", "scale") if one in parts)
    scale = _shape(parts, suffix)
    if prod(scale) == 1:
        return _dense(shape, 8, "one scale")
    if prod(scale) == shape[0]:
        return _dense(shape, 8, "one scale per row")
    if len(scale) == len(shape) and all(scale):
        blocks = [-(-size // count) for size, count in zip(shape, scale, strict=True)]
        blocks = [_power_of_two(block) for block in blocks]
        if all(-(-size // block) == count for size, count, block in zip(shape, scale, blocks, strict=True)):
            return _dense(shape, 8, f"blocks of {' x '.join(map(str, blocks))}")
    return _unequal(suffix, scale, tuple(-(-size // 128) for size in shape))


def _power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length() if size > 1 else 1


def _measure_bnb4(parts: Mapping[str, Part]) -> _Facts:
    elements = 2 * prod(_shape(parts, "weight"))
    blocks = prod(_shape(parts, "weight.absmax"))
    if not blocks or elements % blocks:
        return _Facts(problem=f"{blocks} absmax values do not divide {elements:,} elements")
    return _Facts(elements=elements, bits=4, grouping=f"blocks of {elements // blocks}")


def _measure_bnb8(parts: Mapping[str, Part]) -> _Facts:
    shape, scale = _shape(parts, "weight"), _shape(parts, "SCB")
    return _dense(shape, 8, "one scale per row") if scale == shape[:1] else _unequal("SCB", scale, shape[:1])


def _measure_mxfp4(parts: Mapping[str, Part]) -> _Facts:
    (*outer, groups, half), scale = _shape(parts, "_blocks"), _shape(parts, "_scales")
    if scale != (*outer, groups):
        return _unequal("_scales", scale, (*outer, groups))
    *experts, rows = outer
    columns = groups * half * 2
    shape = (*experts, columns, rows) if experts else (rows, columns)  # experts are dequantised and turned over
    return _dense(shape, 4, f"groups of {2 * half}")


def _measure_mlx(parts: Mapping[str, Part]) -> _Facts:
    (*outer, words), scale = _shape(parts, "weight"), _shape(parts, "scales")
    if scale[:-1] != tuple(outer) or _shape(parts, "biases") != scale:
        return _unequal("scales", scale, (*outer, scale[-1]))
    return _Facts(words=(prod(outer), words), grouping=f"{scale[-1]} scales per row")


_QUANT_STATES = ("weight.quant_state.bitsandbytes__nf4", "weight.quant_state.bitsandbytes__fp4")
_BNB4_PARTS = (*_QUANT_STATES, "weight.nested_absmax", "weight.nested_quant_map")
_FP8 = frozenset({"F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ"})
_INT32 = frozenset({"I32"})
_BYTES = frozenset({"U8", "I8", "F4"})
_SCALES = ("weight_scale_inv", "weight_scale", "scale")
_NVFP4_EXTRA = ("weight_global_scale", "input_global_scale", "weight_scale_2", "input_scale")
_INPUT = ("input_scale", "activation_scale", "weight_scale_2", "k_scale", "v_scale")

_LAYOUTS = (
    _Layout(
        scheme="AWQ or GPTQ",
        main="qweight",
        needs=("qzeros", "scales"),
        may=("g_idx",),
        dtypes=_INT32,
        measure=_measure_gptq_or_awq,
        tells="qzeros",
    ),
    _Layout(
        scheme="bitsandbytes 4-bit",
        main="weight",
        needs=("weight.absmax", "weight.quant_map"),
        may=_BNB4_PARTS,
        dtypes=frozenset({"U8", "BF16", "F16", "F32"}),
        measure=_measure_bnb4,
        marks=("weight.absmax", "weight.quant_map", *_QUANT_STATES),
        tells="weight.absmax",
    ),
    _Layout(
        scheme="bitsandbytes 8-bit",
        main="weight",
        needs=("SCB",),
        may=("weight_format",),
        dtypes=frozenset({"I8"}),
        measure=_measure_bnb8,
        marks=("SCB", "weight_format"),
        tells="SCB",
    ),
    _Layout(
        scheme="NVFP4",
        main="weight_packed",
        needs=("weight_scale",),
        may=_NVFP4_EXTRA,
        dtypes=_BYTES,
        measure=_measure_nvfp4("weight_packed"),
    ),
    _Layout(
        scheme="NVFP4",
        main="weight",
        needs=("weight_scale",),
        may=_NVFP4_EXTRA,
        dtypes=_BYTES,
        measure=_measure_nvfp4("weight"),
        marks=("weight_scale_2", "weight_global_scale"),
    ),
    _Layout(
        scheme="compressed-tensors packed integers",
        main="weight_packed",
        needs=("weight_scale",),
        may=("weight_shape", "weight_zero_point", "weight_g_idx"),
        dtypes=_INT32,
        measure=_measure_compressed,
        tells="weight_shape",
    ),
    _Layout(scheme="fp8", main="weight", may=(*_SCALES, *_INPUT), dtypes=_FP8, measure=_measure_fp8, marks=_SCALES),
    _Layout(
        scheme="MXFP4",
        main="_blocks",
        needs=("_scales",),
        dense="",
        dtypes=frozenset({"U8"}),
        measure=_measure_mxfp4,
    ),
    _Layout(
        scheme="MLX",
        main="weight",
        needs=("scales", "biases"),
        dtypes=frozenset({"U32"}),
        measure=_measure_mlx,
        marks=("scales", "biases"),
    ),
)
