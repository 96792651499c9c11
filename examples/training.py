"""What a training step costs and keeps: our numbers beside the published ones.

python examples/training.py
"""

import introspect

LLAMA = "meta-llama/Meta-Llama-3-8B"


def main() -> None:
    """Print one line a quantity: ours, the published figure, and where it is published."""
    result = introspect.analyze("train", LLAMA, seq=2048, dp=8, tokens=15 * 10**12, tokens_per_second=9000.0)
    totals = result.totals
    states = {row["item"]: row["bytes"] for row in result.tables["states"].rows}
    shards = {row["stage"]: row["bytes_per_rank"] for row in result.tables["sharded_states"].rows}
    kept = {row["method"]: row["bytes"] for row in result.tables["activations"].rows}
    rules = {row["part"]: row["flops_per_token"] for row in result.tables["flops"].rows}
    large = introspect.analyze("train", "meta-llama/Meta-Llama-3-70B", seq=2048).totals
    zero = "ZeRO, Rajbhandari et al. 2020: 16 B a parameter"
    lines = [
        (
            "8B: GFLOP a token, recorded",
            totals["flops_per_token"] / 1e9,
            None,
            "attention dense, its backward 2.5 times",
        ),
        ("8B: 6N, GFLOP a token", rules["6N, N = all parameters"] / 1e9, 48.18, "Kaplan et al. 2020, N = 8.03 B"),
        ("8B: with recomputation", totals["flops_per_token_recompute"] / 1e9, 64.24, "8N; torch repeats less"),
        ("8B: FLOP for 15 T tokens", totals["total_flops"], 7.2e23, "6ND"),
        ("8B: states, GB", totals["state_bytes"] / 1e9, 128.5, zero),
        ("8B: fp32 master weights, GB", states["master_weights"] / 1e9, 32.12, zero),
        ("8B: ZeRO-1 on 8 ranks, GB", shards["zero1"] / 1e9, 44.17, "4 + 12/8 B a parameter"),
        ("8B: ZeRO-2 on 8 ranks, GB", shards["zero2"] / 1e9, 30.11, "2 + 14/8 B a parameter"),
        ("8B: ZeRO-3 on 8 ranks, GB", shards["zero3"] / 1e9, 16.06, "16/8 B a parameter"),
        ("70B: states, GB", large["state_bytes"] / 1e9, 1128.9, zero),
        ("8B: activations kept, GB", kept["saved"] / 1e9, None, "saved-tensor hooks, fused attention"),
        ("8B: the same, scores stored, GB", kept["materialised"] / 1e9, None, "as eager attention keeps them"),
        ("8B: formula, GB", kept["megatron_formula"] / 1e9, 30.6, "Korthikanti et al. 2022, sbh(34 + 5as/h)"),
        ("8B: checkpointed, GB", kept["checkpointed"] / 1e9, None, "layer boundaries and one layer"),
        ("8B: MFU at 9,000 tokens/s on H100", totals["mfu"], 0.44, "6N x 9,000 / 989 TFLOP/s"),
    ]
    print(f"{'quantity':<38}{'ours':>12}{'published':>12}  source")
    for quantity, ours, published, source in lines:
        print(f"{quantity:<38}{ours:>12.4g}{'-' if published is None else f'{published:.4g}':>12}  {source}")


if __name__ == "__main__":
    main()
