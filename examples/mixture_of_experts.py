"""Distinct experts a decode step reads: ours under each routing policy beside published measurements.

python examples/mixture_of_experts.py
"""

import introspect

MEASURED = (
    ("deepseek-ai/DeepSeek-V3", 32, 164, 256),
    ("deepseek-ai/DeepSeek-V3", 64, 226, 256),
    ("Qwen/Qwen3-235B-A22B", 32, 115, 128),
)
"""Model, tokens, distinct experts of one layer as tile-ai/TileOPs measured them (pull requests 2127, 2155), experts."""


def main() -> None:
    """Print one line a measurement: expected of independent uniform choices, drawn under two policies, published."""
    print(f"{'model':<26}{'tokens':>8}{'expected':>10}{'uniform':>9}{'zipf':>7}{'published':>11}  of")
    for model, tokens, published, experts in MEASURED:
        run = {"phase": "decode", "batch": tokens, "context": 64}
        drawn = {
            policy: introspect.analyze("moe", model, routing=policy, **run).totals for policy in ("uniform", "zipf")
        }
        expected, uniform = drawn["uniform"]["expected_experts"], drawn["uniform"]["simulated_experts"]
        zipf = drawn["zipf"]["simulated_experts"]
        print(f"{model:<26}{tokens:>8}{expected:>10.1f}{uniform:>9.1f}{zipf:>7.1f}{published:>11}  {experts}")


if __name__ == "__main__":
    main()
