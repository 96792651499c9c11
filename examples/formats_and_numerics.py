"""Number formats and what their rounding does: our numbers beside the published ones.

python examples/formats_and_numerics.py
"""

import introspect


def main() -> None:
    """Print one line a quantity: ours, the published figure, and where it is published."""
    result = introspect.analyze("numerics", experiment=("swallowed_update", "softmax_sum", "sum_error", "gemm_error"))
    formats = {row["format"]: row for row in result.tables["formats"].rows}
    points = {
        (row["experiment"], row["format"], row["method"], row["at"]): row for row in result.tables["experiments"].rows
    }
    fp8 = "Micikevicius et al. 2022, FP8 Formats for Deep Learning"
    mx = "OCP Microscaling Formats v1.0"
    lines = [
        ("fp16 max", formats["fp16"]["max"], 65504, "IEEE 754 binary16"),
        ("fp16 min normal", formats["fp16"]["min_normal"], 2.0**-14, "IEEE 754 binary16"),
        ("bf16 unit roundoff", formats["bf16"]["unit_roundoff"], 2.0**-8, "usually quoted as its precision"),
        ("tf32 mantissa bits", formats["tf32"]["mantissa_bits"], 10, "NVIDIA A100 whitepaper"),
        ("fp8 e4m3 max", formats["fp8_e4m3fn"]["max"], 448, fp8),
        ("fp8 e4m3 min subnormal", formats["fp8_e4m3fn"]["min_subnormal"], 2.0**-9, fp8),
        ("fp8 e5m2 max", formats["fp8_e5m2"]["max"], 57344, fp8),
        ("fp8 e5m2 min subnormal", formats["fp8_e5m2"]["min_subnormal"], 2.0**-16, fp8),
        ("fp6 e3m2 max", formats["fp6_e3m2"]["max"], 28, mx),
        ("fp4 e2m1 max", formats["fp4_e2m1"]["max"], 6, mx),
        ("fp16 exp overflows past", result.totals["fp16_exp_overflow_at"], 11.09, "ln 65504"),
        ("bf16 swallows, of 1.0", result.totals["bf16_largest_swallowed_update"], 2.0**-8, "ties round to even"),
        (
            "14-bit sums, k = 4096: largest error",
            points["gemm_error", "fp8_e4m3fn", "14 bits", 4096]["largest"],
            0.02,
            "DeepSeek-V3 report, 3.3.2: nearly 2 % relative; ours over the rms, random data",
        ),
        (
            "the same, promoted every 128",
            points["gemm_error", "fp8_e4m3fn", "14 bits, promoted", 4096]["largest"],
            None,
            "their remedy; no figure given",
        ),
    ]
    print(f"{'quantity':<38}{'ours':>14}{'published':>14}  source")
    for quantity, ours, published, source in lines:
        print(f"{quantity:<38}{ours:>14.6g}{'-' if published is None else f'{published:.6g}':>14}  {source}")


if __name__ == "__main__":
    main()
