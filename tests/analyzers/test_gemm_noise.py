import math

import pytest

from introspect.analyzers._gemm_noise import GemmTheory
from introspect.analyzers._rounding import RMS_ROUNDING
from introspect.numerics_record import GemmNoise, KernelDifference


def kernel(rms, *, correct=True, over_bound=0.1):
    return KernelDifference(
        kernel="k",
        correct=correct,
        rms_difference=rms,
        worst_difference=4 * rms,
        worst_over_bound=over_bound,
        share_changed=0.1,
    )


def theory(*kernels, output="bf16", k=4096):
    noise = GemmNoise(
        m=64, k=k, n=128, dtype="bf16", output_dtype=output, mean_ulp=2.0**-8, condition=40.0, kernels=kernels
    )
    return GemmTheory(noise, {"bf16": 2.0**-8, "fp32": 2.0**-24}[output])


def test_the_lines_of_an_fp32_result_by_hand():
    lines = theory(kernel(1e-6), output="fp32")

    assert lines.expected == pytest.approx(RMS_ROUNDING * 2.0**-24 * math.sqrt(4096))  # sqrt(2) sqrt(k / 2)
    assert lines.bound == 2 * 4096 * 2.0**-24 * 40
    assert lines.relative_tolerance == 0
    assert lines.absolute_tolerance == pytest.approx(2 * lines.expected * math.sqrt(2 * math.log(64 * 128)))


def test_the_lines_of_a_rounded_result_by_hand():
    lines = theory(kernel(1e-6))
    difference = RMS_ROUNDING * 2.0**-24 * 64

    assert lines.expected == pytest.approx(math.sqrt(math.sqrt(2 / math.pi) * difference * 2.0**-8))
    assert lines.bound == 2 * 4096 * 2.0**-24 * 40 + 2.0**-7
    assert lines.relative_tolerance == 2.0**-7


def test_verdicts():
    lines = theory()

    assert lines.verdict(kernel(lines.limit * 0.99)) == "noise"
    assert lines.verdict(kernel(lines.limit * 1.01)) == "bug"
    assert lines.verdict(kernel(0.0, over_bound=1.01)) == "bug"


def test_one_flip_among_the_outputs_is_noise():
    """4096 outputs, one of them off by a unit in the last place: rms ulp / 64, whatever k says."""
    assert theory(k=1).verdict(kernel(2.0**-8 / 64)) == "noise"


def test_a_correct_kernel_beyond_the_limit_contradicts_the_theory():
    assert theory(kernel(1.0)).contradicted()
    assert not theory(kernel(1.0, correct=False)).contradicted()


def test_totals_speak_of_correct_kernels_only():
    totals = theory(kernel(1e-5), kernel(2e-5), kernel(0.5, correct=False)).totals()

    assert totals["gemm_measured_difference"] == 2e-5


def test_the_advice_says_when_a_difference_is_a_bug():
    first, bound, test = theory(kernel(1e-6)).advice()

    assert first.startswith("gemm 64 x 4096 x 128, bf16 operands, fp32 sums, bf16 result")
    assert bound == "at any output a difference above 0.000488 (|A||B|) + 0.00781 |C| is a bug"
    assert test.startswith("a test: torch.testing.assert_close(rtol=0.00781, atol=")


def test_the_panel_leaves_out_what_is_identical():
    panel = theory(kernel(0.0), kernel(1e-5)).panel()

    assert panel.series[0].xy == ((1, 1e-5),)
    assert len(panel.ticks) == 2
