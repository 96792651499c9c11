"""What speculative decoding can gain: our numbers beside the published ones.

python examples/speculation.py
"""

import introspect

LLAMA = "meta-llama/Meta-Llama-3-8B"


def main() -> None:
    """Print one line a quantity: ours, the published figure, and where it is published."""
    light = introspect.analyze("speculate", LLAMA, alpha=0.8, gamma=4, draft_cost=0.1, context=1)
    loaded = introspect.analyze("speculate", LLAMA, alpha=0.8, gamma=4, draft_cost=0.1, context=1, batch=256).totals
    certain = introspect.analyze("speculate", LLAMA, alpha=1.0, gamma=4, draft_cost=0.1, context=1).totals
    pair = introspect.analyze("speculate", "meta-llama/Meta-Llama-3-70B", draft=LLAMA, gpu="h200").totals
    mtp = introspect.analyze("speculate", "deepseek-ai/DeepSeek-V3", alpha=0.85, gamma=1, batch=128, gpu="h200").totals
    leviathan = "Leviathan et al. 2023"
    lines = [
        ("expected tokens, alpha 0.8, gamma 4", light.totals["expected_tokens"], 3.3616, f"{leviathan}, eq. 1"),
        ("the same, alpha 1", certain["expected_tokens"], 5, f"{leviathan}: its limit, gamma + 1"),
        ("speed-up at batch 1, draft costs 0.1", light.totals["speedup"], 2.401, f"{leviathan}, theorem 3.8"),
        ("best gamma", light.totals["best_gamma"], 6, "(1 - 0.8^7) / 0.2 / 1.6 = 2.470 is the largest"),
        ("speed-up at batch 256", loaded["speedup"], None, "1,280 rows: the verify step is bound by compute"),
        ("batch at which the gain is gone", light.totals["breakeven_batch"], None, "weights alone would give 175"),
        ("70B with the 8B as draft", pair["speedup"], None, "both decode steps traced"),
        ("DeepSeek-V3 MTP, batch 128, alpha 0.85", mtp["speedup"], 1.8, "DeepSeek-V3 report, 5.4.3: TPS x 1.8"),
    ]
    print(f"{'quantity':<40}{'ours':>10}{'published':>12}  source")
    for quantity, ours, published, source in lines:
        print(f"{quantity:<40}{ours:>10.4g}{'-' if published is None else f'{published:.4g}':>12}  {source}")


if __name__ == "__main__":
    main()
