"""What 128K tokens cost, and how rotary positions reach that far: our numbers beside the published ones.

python examples/long_context.py
"""

import introspect

LLAMA = "meta-llama/Meta-Llama-3-8B"


def main() -> None:
    """Print one line a quantity: ours, the published figure, and where it is published."""
    llama = introspect.analyze("context", LLAMA, context=(8192, 131072), mfu=0.6, rope=("yarn:4",))
    short, long = llama.tables["lengths"].rows
    llama2 = introspect.analyze("context", "meta-llama/Llama-2-7b-hf", context=4096)
    llama31 = introspect.analyze("context", "meta-llama/Meta-Llama-3.1-8B", context=131072).tables["rope"].rows
    oss = introspect.analyze("context", "openai/gpt-oss-20b", context=131072).tables["rope"].rows
    deepseek = introspect.analyze("context", "deepseek-ai/DeepSeek-V3", context=131072).tables["rope"].rows
    crossing = llama.totals["attention_passes_weights_at"]
    stretch = llama31[63]["wavelength_tokens"] / llama31[63]["unscaled_wavelength_tokens"]
    yarn = deepseek[31]["wavelength_tokens"] / deepseek[31]["unscaled_wavelength_tokens"]
    factor = llama.tables["rope_what_if"].rows[0]["attention_factor"]
    lines = [
        ("8B, 128K prefill: PFLOP", long["prefill_flops"] / 1e15, 6.47, "2.0 weights + 4.5 causal attention"),
        ("8B, 8K: attention's share", short["prefill_attention_share"], 0.125, "17.6 of 140.6 TFLOP"),
        ("8B, 8K decode: GFLOP a token", short["decode_flops"] / 1e9, 19.3, "15.0 + 4.3"),
        ("8B, 128K: attention GFLOP a token", long["decode_attention_flops"] / 1e9, 68.72, "4 x 4096 x 131072 x 32"),
        ("attention passes the weights at", crossing, 28628, "15.009 G / 524288"),
        ("8B, 128K TTFT at 60 % MFU, s", long["ttft_seconds"], 10.7, "6.33 PFLOP / 594 TFLOP/s"),
        ("score matrix of a layer, 128K: TB", long["score_bytes_per_layer"] / 1e12, 1.1, "32 x 131072^2 x 2 B"),
        (
            "Llama 2: longest wavelength, tokens",
            llama2.tables["rope"].rows[63]["wavelength_tokens"],
            54410,
            "2 pi 10000^(126/128)",
        ),
        ("  pairs that never turn in 4096", llama2.totals["rope_pairs_incomplete"], 18, "pairs 46 to 63"),
        ("Llama 3: the same in 8192", llama.totals["rope_pairs_incomplete"], 29, "pairs 35 to 63"),
        ("Llama 3.1 stretches slow pairs by", stretch, 8, "rope_scaling factor of its config"),
        ("DeepSeek-V3 (YaRN) by", yarn, 40, "rope_scaling factor of its config"),
        ("gpt-oss: YaRN's cos/sin factor", oss[0]["attention_factor"], 1.3466, "0.1 ln 32 + 1"),
        ("what if YaRN x4 on Llama 3", factor, 1.1386, "0.1 ln 4 + 1"),
    ]
    print(f"{'quantity':<38}{'ours':>12}{'published':>12}  source")
    for quantity, ours, published, source in lines:
        print(f"{quantity:<38}{ours:>12.5g}{published:>12.5g}  {source}")


if __name__ == "__main__":
    main()
