import math

import pytest
import torch

from introspect.hooks.numerics_experiments import BLOCKS, _block_maximum, _welford, measure
from introspect.numerics_record import EXPERIMENTS, SOFTMAX_WIDTH


@pytest.fixture(autouse=True)
def one_thread():
    """As `gather` measures."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def points(experiment, **wanted):
    return [point for point in measure(experiment, 0) if all(getattr(point, k) == v for k, v in wanted.items())]


@pytest.mark.parametrize("experiment", [name for name in EXPERIMENTS if name not in ("sum_error", "gemm_error")])
def test_the_seed_decides_everything(experiment):
    assert measure(experiment, 7) == measure(experiment, 7)
    assert {point.experiment for point in measure(experiment, 7)} == {experiment}


def test_another_seed_gives_other_data():
    assert measure("variance", 0) != measure("variance", 1)


@pytest.mark.parametrize("format", ["fp16", "bf16"])
def test_the_bisection_finds_what_trying_every_update_finds(format):
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}[format]
    updates = torch.arange(2**15, dtype=torch.int16).view(dtype)
    updates = updates[updates.isfinite()]
    (point,) = points("swallowed_update", format=format)

    assert point.measured == updates[1 + updates == 1].max().item()


def test_fp16_overflows_at_the_first_number_whose_exponential_rounds_beyond_65504():
    (point,) = points("exp_overflow", format="fp16")
    before = point.measured - 2.0**-7  # numbers of [8, 16) are 2^-7 apart

    assert math.exp(before) < 65520 < math.exp(point.measured)


def test_a_softmax_in_fp16_first_loses_its_mass_then_its_meaning():
    found = {point.at: point.measured for point in points("softmax_sum", format="fp16", method="as written")}

    # 1024 e^x passes 65520 at x = ln(63.98) = 4.159; e^x itself at 11.09
    assert math.log(65520 / SOFTMAX_WIDTH) == pytest.approx(4.159, abs=1e-3)
    assert found[4.125] == 1
    assert found[4.25] == 0
    assert found[11.0] == 0
    assert found[12.0] is None
    assert {point.measured for point in points("softmax_sum", method="max subtracted")} == {1.0}


def test_a_bf16_weight_needs_a_master_copy_or_stochastic_rounding():
    found = {point.method: point.measured for point in points("update_drift", at=4096)}

    assert found["nearest even"] == 0
    assert found["fp32 master copy"] == 4  # 4096 * 2^-10
    assert found["stochastic"] == pytest.approx(4, rel=0.02)


def test_welford_is_the_population_variance():
    x = torch.tensor([[1.0], [2.0], [4.0]], dtype=torch.float64)

    assert _welford(x).item() == pytest.approx(14 / 9)  # mean 7/3: (16 + 1 + 25) / 9 / 3


@pytest.mark.parametrize(
    ("rows", "columns", "expected"),
    [
        (2, 4, [[8, 8, 8, 8], [8, 8, 8, 8]]),
        (1, 4, [[4, 4, 4, 4], [8, 8, 8, 8]]),
        (2, 2, [[6, 6, 8, 8], [6, 6, 8, 8]]),
        (1, 2, [[2, 2, 4, 4], [6, 6, 8, 8]]),
    ],
)
def test_a_block_shares_its_largest_magnitude(rows, columns, expected):
    x = torch.tensor([[1.0, -2.0, 3.0, 4.0], [5.0, 6.0, -7.0, -8.0]])

    assert _block_maximum(x, rows, columns).tolist() == expected


def test_smaller_blocks_keep_outliers_to_themselves():
    found = {point.method: point.measured for point in points("quantisation", format="int8")}

    assert list(found) == list(BLOCKS)
    assert found["1x128"] < found["channel"] < found["tensor"]
    assert found["1x128"] < found["128x128"] < found["tensor"]


def test_fp8_has_the_range_for_outliers_at_any_block():
    found = [point.measured for point in points("quantisation", format="fp8_e4m3fn")]

    assert max(found) / min(found) < 1.05
