"""The measured points beside theory, from one run of the whole command."""

import json
import math
from dataclasses import replace

import pytest

import introspect
from introspect.analyzers import numerics
from introspect.analyzers._numerics_figure import ABOUT
from introspect.hooks.numerics import gather
from introspect.numerics_record import EXPERIMENTS, NumericsParams

PARAMS = NumericsParams(gemm="64,512,64", experiment=EXPERIMENTS)


@pytest.fixture(scope="module")
def record():
    return gather(PARAMS)


@pytest.fixture(scope="module")
def result(record):
    return numerics.analyze(PARAMS, record)


def rows(result, **wanted):
    table = result.tables["experiments"]
    return [row for row in table.rows if all(row[name] == value for name, value in wanted.items())]


def test_the_totals_of_the_contract(result):
    assert result.totals["fp16_exp_overflow_at"] == math.log(65504)
    assert result.totals["bf16_largest_swallowed_update"] == 2.0**-8


def test_the_total_is_what_was_measured(result):
    (row,) = rows(result, experiment="swallowed_update", format="bf16")

    assert row["measured"] == result.totals["bf16_largest_swallowed_update"]


def test_every_experiment_has_points_a_quantity_and_a_panel(result):
    assert {row["experiment"] for row in result.tables["experiments"].rows} == set(EXPERIMENTS) == set(ABOUT)
    assert [row["experiment"] for row in result.tables["quantities"].rows] == list(EXPERIMENTS)
    assert len(result.figure.panels) == len(EXPERIMENTS) + 1  # and the product's


def test_no_bound_is_passed(result):
    judged = [row for row in result.tables["experiments"].rows if row["bound"] is not None]

    assert len(judged) > 80
    assert all(row["holds"] for row in judged)
    assert not result.findings


CLOSE = {
    # How far the measured root mean square may be from the expected one, as a factor.
    "swallowed_update": 1.0,
    "update_drift": 1.1,  # stochastic rounding of 64 weights
    "exp_overflow": 1.01,  # x is one of the format's own numbers
    "softmax_sum": 1.0,
    "sum_error": 2.5,  # the random walk of 64 sums; the first cut of the 14-bit sum
    "gemm_error": 3.0,  # bf16 products are often added exactly in fp32
    "variance": 1.6,
    "quantisation": 1.05,
}


@pytest.mark.parametrize("experiment", CLOSE)
def test_points_lie_on_the_expected_line(result, experiment):
    found = rows(result, experiment=experiment)

    for row in found:
        if not row["expected"]:
            assert row["measured"] == row["expected"], row
        else:
            assert 1 / CLOSE[experiment] <= row["measured"] / row["expected"] <= CLOSE[experiment], row


def test_shares_of_gradients_are_within_five_standard_errors(result):
    for row in rows(result, experiment="loss_scale"):
        error = math.sqrt(row["expected"] / 2**18)

        assert abs(row["measured"] - row["expected"]) <= 5 * error + 2**-18, row


def test_promotion_keeps_the_error_of_a_long_sum_that_of_128_terms(result):
    plain, promoted = (
        {row["at"]: row["measured"] for row in rows(result, experiment="sum_error", method=method)}
        for method in ("14 bits", "14 bits, promoted")
    )

    assert plain[16384] > 0.2
    assert promoted[16384] < 0.001


def test_a_violated_bound_is_a_finding(record):
    point = next(point for point in record.measurements if point.experiment == "swallowed_update")
    broken = replace(record, measurements=(replace(point, worst=1.0),))
    result = numerics.analyze(PARAMS, broken)

    assert result.findings
    assert result.tables["experiments"].rows[0]["holds"] is False


def test_a_correct_kernel_that_looks_wrong_is_a_finding(record):
    kernels = tuple(replace(kernel, rms_difference=0.5) for kernel in record.gemm.kernels)
    result = numerics.analyze(PARAMS, replace(record, gemm=replace(record.gemm, kernels=kernels)))

    assert result.findings


def test_every_planted_bug_is_told_from_noise(result):
    for row in result.tables["gemm"].rows:
        assert row["verdict"] == ("noise" if row["correct"] else "bug"), row


def test_what_was_assumed_is_said_of_what_ran(record, result):
    assert [text.partition(":")[0] for text in result.assumptions] == [
        "tensor core",
        "gradients",
        "activations",
        "gemm",
    ]
    alone = replace(record, measurements=(), gemm=None)
    assert numerics.analyze(PARAMS, alone).assumptions == ()


def test_the_json_has_no_value_json_lacks(result):
    assert json.loads(json.dumps(result.to_dict(), allow_nan=False))["command"] == "numerics"


def test_python_and_the_plot_take_the_same_path(tmp_path):
    path = tmp_path / "drift.svg"
    result = introspect.analyze("numerics", experiment="update_drift", plot=str(path))

    assert set(result.tables) == {"formats", "experiments", "quantities"}
    assert "gain of the weight" in path.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gemm": "4096"}, "--gemm: got '4096', expected M,K,N: three integers from 1, K up to 262144"),
        ({"plot": "x.pdf"}, "--plot: got 'x.pdf', expected a file name ending in .svg or .png"),
        (
            {"experiment": "sum_err"},
            "experiment: got 'sum_err', expected swallowed_update, update_drift, exp_overflow, softmax_sum, sum_error, "
            "gemm_error, loss_scale, variance or quantisation; did you mean sum_error?",
        ),
        ({"seed": -1}, "seed: got -1, expected an integer at least 0"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(introspect.errors.OptionError) as error:
        introspect.analyze("numerics", **options)

    assert str(error.value) == message
