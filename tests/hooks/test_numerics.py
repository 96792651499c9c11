import torch

from introspect.hooks.numerics import gather
from introspect.numerics_record import NumericsParams


def test_only_what_was_asked_for_is_measured():
    record = gather(NumericsParams(experiment=("variance", "exp_overflow")))

    assert [point.experiment for point in record.measurements][:1] == ["variance"]
    assert {point.experiment for point in record.measurements} == {"variance", "exp_overflow"}
    assert record.gemm is None
    assert record.format("bf16").epsilon == 2.0**-7


def test_a_product_is_measured_instead_of_the_experiments():
    record = gather(NumericsParams(gemm="8,32,8", dtype="fp16"))

    assert record.measurements == ()
    assert (record.gemm.m, record.gemm.k, record.gemm.n, record.gemm.dtype) == (8, 32, 8, "fp16")


def test_both_when_both_are_asked_for():
    record = gather(NumericsParams(gemm="8,32,8", experiment=("exp_overflow",)))

    assert record.gemm is not None
    assert len(record.measurements) == 2


def test_the_number_of_threads_is_given_back():
    before = torch.get_num_threads()
    gather(NumericsParams(experiment=("exp_overflow",)))

    assert torch.get_num_threads() == before
