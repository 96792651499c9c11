import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from introspect.hooks.summation import in_order, pairwise, tensor_core


def ones(count):
    return torch.ones(count, 1)


def last(results):
    *_, (_, total) = results
    return total.item()


@pytest.mark.parametrize(
    ("format", "stuck_at"),
    [
        ("bf16", 256),  # 256 + 1 lies halfway between 256 and 258: the even 256
        ("fp16", 2048),
        ("fp8_e4m3fn", 16),
        ("fp8_e5m2", 8),
    ],
)
def test_a_sum_of_ones_stops_at_one_over_the_roundoff(format, stuck_at):
    assert last(in_order(ones(3000), format, (3000,))) == stuck_at


def test_sums_are_read_where_asked():
    assert [(k, total.item()) for k, total in in_order(ones(600), "bf16", (2, 256, 600))] == [
        (2, 2),
        (256, 256),
        (600, 256),
    ]


def test_by_halves_nothing_is_swallowed():
    assert pairwise(ones(4096), "bf16").item() == 4096


@given(st.lists(st.integers(-1000, 1000), min_size=1, max_size=64))
def test_small_integers_are_added_exactly(values):
    terms = torch.tensor(values, dtype=torch.float32)[:, None]

    assert last(in_order(terms, "fp32", (len(values),))) == sum(values)


def test_a_group_is_cut_to_fourteen_bits_of_its_largest():
    """Beside 1.0 the last kept bit is 2^-13; 2^-13 stays, 2^-14 goes, whatever their number."""
    group = torch.zeros(32, 1)
    group[0] = 1.0
    group[1] = 2.0**-13
    group[2:12] = 2.0**-14

    assert last(tensor_core([group], (32,), False)) == 1 + 2.0**-13


def test_cutting_is_towards_zero():
    group = torch.zeros(32, 1)
    group[0] = -1.0
    group[1] = -(2.0**-14)

    assert last(tensor_core([group], (32,), False)) == -1.0


def test_the_running_sum_is_aligned_too():
    """After 2^14 the unit is 2: a group of ones adds nothing."""
    groups = [torch.zeros(32, 1), torch.ones(32, 1)]
    groups[0][0] = 2.0**14

    assert last(tensor_core(groups, (64,), False)) == 2.0**14


def test_promotion_starts_again_every_128_products():
    """2^14, three groups of nothing, then 32 ones: a fresh 14-bit sum holds them, and fp32 holds both."""
    groups = [torch.zeros(32, 1) for _ in range(4)] + [torch.ones(32, 1)]
    groups[0][0] = 2.0**14

    assert last(tensor_core(groups, (160,), True)) == 2.0**14 + 32
    assert last(tensor_core(groups, (160,), False)) == 2.0**14


@settings(max_examples=20)
@given(st.integers(0, 2**32 - 1), st.booleans())
def test_the_tensor_core_error_is_within_34_units_a_group(seed, promote):
    products = torch.randn((256, 4), generator=torch.Generator().manual_seed(seed)).half().float()
    exact, size = products.double().sum(0), products.double().abs().sum(0)
    *_, (_, total) = tensor_core(products.split(32), (256,), promote)

    assert ((total - exact).abs() <= size * 2.0**-13 * 34 * 8).all()
