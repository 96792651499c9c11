"""What adapters add to a model: our numbers beside the published ones.

python examples/lora.py
"""

import introspect

LLAMA = "meta-llama/Meta-Llama-3-8B"


def main() -> None:
    """Print one line a quantity: ours, the published figure, and where it is published."""
    attention = introspect.analyze("lora", LLAMA, rank=16, target="attention")
    everywhere = introspect.analyze("lora", LLAMA, rank=16, target="all-linear").totals
    quantised = introspect.analyze("lora", LLAMA, rank=16, target="attention", base="nf4").totals
    twice = introspect.analyze("lora", LLAMA, rank=16, target="attention", base="nf4-dq").totals
    totals = attention.totals
    (query,) = (row for row in attention.tables["matrices"].rows if row["module"].endswith("q_proj"))
    bnb = "vocabulary kept in bf16; 4.5 GB is often quoted for all weights in 4.5 bits"
    lines = [
        ("parameters, q k v o, M", totals["params"] / 1e6, 13.63, "16 x 32 x (8192 + 5120 + 5120 + 8192)"),
        ("parameters, all Linears, M", everywhere["params"] / 1e6, 41.94, "PEFT's print_trainable_parameters"),
        (
            "the same, share of the model, %",
            100 * everywhere["share"],
            0.5223,
            "41.94 M of 8.03 B",
        ),
        ("states, q k v o, MB", totals["state_bytes"] / 1e6, 218.1, "16 B a trained parameter"),
        ("extra FLOPs of q_proj, %", 100 * query["extra_flops_share"], 0.78125, "16 x 8192 / 4096^2"),
        ("frozen base in bf16, GB", totals["base_bytes"] / 1e9, 16.06, "2 B a parameter"),
        ("frozen base in nf4, GB", quantised["base_bytes"] / 1e9, 6.03, bnb),
        ("the same, double-quantised, GB", twice["base_bytes"] / 1e9, 5.70, "QLoRA, Dettmers et al. 2023: 4.127 bits"),
        ("GFLOP a token, tuning", totals["flops_per_token"] / 1e9, None, "no weight gradients of the base"),
        ("the same, full training", totals["flops_per_token_full"] / 1e9, None, "see examples/training.py"),
        ("activations kept, GB", totals["activation_bytes"] / 1e9, None, "recorded step with a frozen base"),
        ("the same, full training, GB", totals["activation_bytes_full"] / 1e9, None, "see examples/training.py"),
    ]
    print(f"{'quantity':<38}{'ours':>12}{'published':>12}  source")
    for quantity, ours, published, source in lines:
        print(f"{quantity:<38}{ours:>12.4g}{'-' if published is None else f'{published:.4g}':>12}  {source}")


if __name__ == "__main__":
    main()
