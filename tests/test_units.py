import pytest
from hypothesis import given
from hypothesis import strategies as st

from introspect.units import DTYPE_BITS, number_text, product_flops, tensor_bytes, unit_of


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (16_060_522_496, "B", "16.06 GB"),  # decimal, as vendors count
        (512, "B", "512 B"),
        (999_950, "B", "1 MB"),  # never 1000 kB
        (15_009_861_632, "FLOP", "15.01 GFLOP"),
        (3.35e12, "B/s", "3.35 TB/s"),
        (0.004478, "s", "4.478 ms"),
        (0.26, "s", "260 ms"),
        (2.5e-7, "s", "250 ns"),
        (10.6, "s", "10.6 s"),
        (0, "s", "0 s"),
        (0.1308, "share", "13.1 %"),
        (1.0, "share", "100 %"),
        (5.1e-7, "share", "< 0.01 %"),
        (0.0, "share", "0 %"),
        (23.904, "share", "2,390 %"),  # never 2.39e+03 %
        (9.996, "share", "1,000 %"),
        (-1e-5, "share", "> -0.01 %"),
        (4096, "", "4,096"),
        (295.2239, "FLOP/B", "295.2"),
        (163.97, "", "164"),
        (123456.7, "tokens", "123,457"),
        (-131072, "B", "-131.1 kB"),
        (float("inf"), "B", "inf"),
    ],
)
def test_numbers_for_people(value, unit, text):
    assert number_text(value, unit) == text


@given(st.integers(min_value=0, max_value=10**24))
def test_a_prefix_keeps_four_digits_of_the_value(value):
    number, unit = number_text(value, "B").split(" ")
    power = ("B", "kB", "MB", "GB", "TB", "PB", "EB", "ZB", "YB").index(unit)

    assert float(number) * 1000**power == pytest.approx(value, rel=5e-4)
    assert float(number) < 1000


@pytest.mark.parametrize(
    ("name", "unit"),
    [
        ("kv_bytes_per_token", "B"),
        ("bytes_at_context", "B"),
        ("attention_flops_causal", "FLOP"),
        ("decode_flop_per_byte", "FLOP/B"),
        ("bandwidth_bytes_per_second", "B/s"),
        ("bf16_flops_per_second", "FLOP/s"),
        ("prefill_8k_seconds", "s"),
        ("tokens_per_second", ""),
        ("extra_flops_share", "share"),
        ("mfu", "share"),
        ("expected_experts", ""),
    ],
)
def test_the_name_of_a_total_carries_its_unit(name, unit):
    assert unit_of(name) == unit


def test_four_bit_values_round_up_to_whole_bytes():
    assert tensor_bytes((3,), "int4") == 2  # 12 bits
    assert tensor_bytes((4096, 4096), "bf16") == 4096 * 4096 * DTYPE_BITS["bf16"] // 8


def test_a_multiply_and_an_add_are_two():
    assert product_flops(3, 4, 5, 6) == 2 * 3 * 4 * 5 * 6
