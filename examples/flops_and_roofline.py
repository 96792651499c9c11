"""What a token costs and how fast it can be at best: our numbers beside the published ones.

python examples/flops_and_roofline.py
"""

import introspect

LLAMA = "meta-llama/Meta-Llama-3-8B"


def main() -> None:
    """Print one line a quantity: ours, the published figure, and where it is published."""
    decode = introspect.analyze("roofline", LLAMA, phase="decode", context=1, gpu=("h100-sxm", "a100-80g"))
    h100, a100 = decode.tables["gpus"].rows
    short = introspect.analyze("roofline", LLAMA, phase="decode", context=128).tables["gpus"].rows[0]
    prefill = introspect.analyze("roofline", LLAMA, seq=8192, mfu=0.6).tables["gpus"].rows[0]
    trace = introspect.analyze("trace", LLAMA, phase="decode", context=2048).totals
    mixtral = introspect.analyze("trace", "mistralai/Mixtral-8x7B-v0.1", phase="decode", context=2048).totals
    lines = [
        ("8B: GEMM GFLOP a token", trace["weight_flops"] / 1e9, 16.06, "2N with N = 8.03 B: counts the embedding"),
        ("Mixtral: GEMM GFLOP a token", mixtral["weight_flops"] / 1e9, 25.8, "2 x 12.9 B active, the same way"),
        ("H100 SXM: ridge, FLOP/B", h100["ridge_flop_per_byte"], 295, "989 TFLOP/s over 3.35 TB/s"),
        (
            "A100 80 GB: ridge, FLOP/B",
            a100["ridge_flop_per_byte"],
            156,
            "312 TFLOP/s over 2.0 TB/s (2.039 on the sheet)",
        ),
        ("8B on H100: ms a token", 1e3 * h100["seconds"], 4.8, "all 16.06 GB read; 15.01 GB are touched"),
        ("the same, whole weights read", 1e3 * h100["seconds_whole_weights"], 4.8, "as published"),
        ("8B on H100: tokens/s, batch 1", h100["tokens_per_second"], 200, "1 / 4.8 ms, rounded"),
        ("8B on A100: ms a token", 1e3 * a100["seconds"], 8.0, "16.06 GB over 2.0 TB/s"),
        ("batch where decode is compute-bound", h100["crossover_batch"], 295, "the ridge itself, weights alone"),
        ("the same with cache at 128 tokens", short["crossover_batch_with_kv"], None, "derived in docs/serving.md"),
        ("no batch is enough beyond, tokens", short["max_compute_bound_context"], None, "derived in docs/serving.md"),
        ("8B: 8K prefill at 60 % MFU, s", prefill["seconds"], 0.26, "156 TFLOP: all logits, unmasked attention"),
    ]
    print(f"{'quantity':<38}{'ours':>12}{'published':>12}  source")
    for quantity, ours, published, source in lines:
        print(f"{quantity:<38}{ours:>12.4g}{'-' if published is None else f'{published:.4g}':>12}  {source}")


if __name__ == "__main__":
    main()
