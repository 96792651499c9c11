from __future__ import annotations

from dataclasses import replace

from introspect.twin_record import OUTPUT_TOLERANCE, TwinAgreement, TwinReport

SAME = TwinAgreement(phase="prefill", tokens=12, kind="linear", both=7, meta_only=0, cpu_only=0)
REPORT = TwinReport(
    class_name="Tiny", parameters=10, changed=(), agreements=(SAME,), differences=(), output_error=OUTPUT_TOLERANCE
)


def test_a_twin_is_verified_when_calls_and_logits_agree():
    assert REPORT.verified


def test_one_call_that_only_one_run_made_is_enough_to_refuse():
    for different in (replace(SAME, meta_only=1), replace(SAME, cpu_only=1)):
        report = replace(REPORT, agreements=(SAME, different))
        assert not report.same_calls
        assert not report.verified


def test_logits_that_differ_or_cannot_be_compared_are_not_verified():
    for error in (OUTPUT_TOLERANCE * 1.01, None):
        report = replace(REPORT, output_error=error)
        assert report.same_calls
        assert not report.verified
