"""Quantised layouts from stored shapes: each layout's own definition, turned round."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from introspect.checkpoint import Checkpoint, Index, Unread
from introspect.packed import Packed, Part, find_packed, parts_of
from introspect.safetensors_header import Header, StoredTensor


def stored(**parts):
    """Parts by name, with __ for a dot: (dtype, shape)."""
    return {name.replace("__", "."): Part(*part) for name, part in parts.items()}


def only(parts, bits=None):
    (packed,) = find_packed(parts, bits)
    return packed


ROWS = st.integers(1, 64).map(lambda n: 32 * n)
GROUPS = st.integers(1, 12)
BITS = st.sampled_from([2, 4, 8])


@given(n=ROWS, groups=GROUPS, group=st.sampled_from([32, 64, 128]), bits=BITS)
def test_gptq_and_awq_tell_matrix_bits_and_group(n, groups, group, bits):
    k = groups * group
    shared = {"qzeros": ("I32", (groups, n * bits // 32)), "scales": ("F16", (groups, n))}

    gptq = only(stored(qweight=("I32", (k * bits // 32, n)), g_idx=("I32", (k,)), **shared))
    awq = only(stored(qweight=("I32", (k, n * bits // 32)), **shared))

    assert (gptq.shape, gptq.bits, gptq.problem) == ((n, k), bits, None)
    assert (awq.shape, awq.bits, awq.problem) == ((n, k), bits, None)
    assert (gptq.scheme, awq.scheme) == ("GPTQ", "AWQ")
    assert gptq.grouping == (f"groups of {group}" if groups > 1 else "one scale per row")


@given(n=ROWS, groups=GROUPS, bits=BITS)
def test_compressed_tensors_need_bits_or_zero_points(n, groups, bits):
    k = groups * 128
    parts = stored(weight_packed=("I32", (n, k * bits // 32)), weight_scale=("BF16", (n, groups)))

    alone, told = only(parts), only(parts, bits)
    zeros = only(parts | stored(weight_zero_point=("I32", (n * bits // 32, groups))))

    assert (alone.shape, alone.bits) == (None, None)
    assert (told.shape, told.bits) == ((n, k), bits)
    assert (zeros.shape, zeros.bits) == ((n, k), bits)


@given(n=st.integers(1, 3000), k=st.integers(1, 3000))
def test_fp8_blocks_fit_any_matrix(n, k):
    packed = only(stored(weight=("F8_E4M3", (n, k)), weight_scale_inv=("F32", (-(-n // 128), -(-k // 128)))))

    assert (packed.shape, packed.bits, packed.problem) == ((n, k), 8, None)


@given(n=st.integers(1, 64), k=st.integers(1, 64).map(lambda k: 64 * k))
def test_bitsandbytes_tells_elements_only(n, k):
    parts = stored(
        weight=("U8", (n * k // 2, 1)), weight__absmax=("F32", (n * k // 64,)), weight__quant_map=("F32", (16,))
    )

    packed = only(parts)

    assert (packed.shape, packed.elements, packed.grouping) == (None, n * k, "blocks of 64")


@pytest.mark.parametrize(
    ("parts", "scheme", "shape", "grouping"),
    [
        (
            stored(
                weight_packed=("U8", (64, 32)), weight_scale=("F8_E4M3", (64, 4)), weight_global_scale=("F32", (1,))
            ),
            "NVFP4",
            (64, 64),
            "groups of 16",
        ),
        (
            stored(weight=("U8", (64, 32)), weight_scale=("F8_E4M3", (64, 4)), weight_scale_2=("F32", ())),
            "NVFP4",
            (64, 64),
            "groups of 16",
        ),
        (stored(weight=("F8_E4M3", (9, 7)), weight_scale=("F32", ())), "fp8", (9, 7), "one scale"),
        (stored(weight=("F8_E5M2", (9, 7)), weight_scale=("F32", (9, 1))), "fp8", (9, 7), "one scale per row"),
        (stored(weight=("I8", (9, 7)), SCB=("F32", (9,))), "bitsandbytes 8-bit", (9, 7), "one scale per row"),
        (
            stored(up_blocks=("U8", (3, 10, 2, 16)), up_scales=("U8", (3, 10, 2))),
            "MXFP4",
            (3, 64, 10),
            "groups of 32",
        ),
    ],
)
def test_layouts_without_a_choice(parts, scheme, shape, grouping):
    packed = only(parts)

    assert (packed.scheme, packed.shape, packed.grouping, packed.problem) == (scheme, shape, grouping, None)


@pytest.mark.parametrize(
    ("parts", "problem"),
    [
        (stored(weight=("I8", (9, 7)), SCB=("F32", (8,))), "SCB is [8], the other parts ask for [9]"),
        (
            stored(weight=("F8_E4M3", (256, 256)), weight_scale_inv=("F32", (7, 3))),
            "weight_scale_inv is [7, 3], the other parts ask for [2, 2]",
        ),
        (
            stored(qweight=("I32", (32, 64)), qzeros=("I32", (3, 8)), scales=("F16", (2, 64))),
            "qzeros is [3, 8], the other parts ask for [2, 8]",
        ),
        (
            stored(qweight=("I32", (32, 64)), qzeros=("I32", (2, 8)), scales=("F16", (2, 64)), g_idx=("I32", (5,))),
            "g_idx is [5], the other parts ask for [256]",
        ),
        (
            stored(qweight=("I32", (32,)), qzeros=("I32", (2, 8)), scales=("F16", (2, 64))),
            "their numbers of dimensions do not fit this layout",
        ),
        (
            stored(qweight=("I32", (32, 0)), qzeros=("I32", (2, 0)), scales=("F16", (2, 0))),
            "their numbers of dimensions do not fit this layout",
        ),
        (
            stored(weight=("U8", (7, 1)), weight__absmax=("F32", (3,)), weight__quant_map=("F32", (16,))),
            "3 absmax values do not divide 14 elements",
        ),
    ],
)
def test_parts_that_disagree_are_said(parts, problem):
    assert only(parts).problem == problem


def test_a_lost_part_is_named_and_so_is_a_lost_main_tensor():
    parts = stored(
        l__qweight=("I32", (32, 64)), l__scales=("F16", (2, 64)), m__qzeros=("I32", (2, 8)), m__scales=("F16", (2, 64))
    )

    lost = {packed.parameter: packed.lost for packed in find_packed(parts)}

    assert lost == {"l.weight": ("l.qzeros",), "m.weight": ("m.qweight",)}


def test_plain_tensors_are_no_layout():
    parts = stored(
        a__weight=("BF16", (4, 4)), a__scales=("F16", (2,)), b__weight=("F8_E4M3", (4, 4)), thickqweight=("I32", (4, 4))
    )

    assert find_packed(parts) == ()


def test_names_alone_tell_the_layout():
    names = ("l.qweight", "l.qzeros", "l.scales", "m.weight", "m.weight.absmax", "m.weight.quant_map")

    found = find_packed({name: Part(None, None) for name in names})

    assert [(packed.scheme, packed.parameter, packed.shape) for packed in found] == [
        ("AWQ or GPTQ", "l.weight", None),
        ("bitsandbytes 4-bit", "m.weight", None),
    ]


def test_parts_of_a_checkpoint_with_an_unread_shard():
    tensor = StoredTensor("a", "F32", (2,), 0, 8)
    header = Header(file="1", file_bytes=99, data_start=91, tensors=(tensor,), metadata=None, faults=())
    index = Index(file="i", weight_map={"a": "1", "b": "2", "c": "1"}, total_size=None, metadata={})
    unread = Unread(file="2", kind="empty_file", found="", expected="")

    parts = parts_of(Checkpoint(source="s", kind="folder", headers=(header,), unread=(unread,), index=index))

    assert parts == {"a": Part("F32", (2,)), "b": Part(None, None)}


def test_a_packed_value_is_frozen():
    packed = Packed(scheme="x", parameter="w", parts=("w",))

    with pytest.raises(AttributeError):
        packed.scheme = "y"
