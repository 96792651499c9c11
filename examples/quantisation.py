"""Bytes of weights in each format, and what they gain: our numbers beside the published ones.

python examples/quantisation.py
"""

import introspect

LLAMA = "meta-llama/Meta-Llama-3-8B"


def weights(model: str, name: str, **options: object) -> dict:
    """One format of one model: its row of the table of formats."""
    result = introspect.analyze("quant", model, only=name, context=64, seq=64, **options)
    return result.tables["formats"].rows[0]


def main() -> None:
    """Print one line a quantity: ours, the published figure, and where it is published."""
    timed = introspect.analyze("quant", LLAMA, only=("int4-g128", "fp8-channel"))
    int4, fp8 = timed.tables["gpus"].rows
    lines = [
        ("8B int4 g128: bits a weight", weights(LLAMA, "int4-g128")["bits_per_weight"], 4.25, "16 + 16 bits for 128"),
        ("8B int4 g128, GB", weights(LLAMA, "int4-g128")["weight_bytes"] / 1e9, 5.81, "head and embedding in bf16"),
        ("8B AWQ: bits a weight", weights(LLAMA, "awq-int4-g128")["bits_per_weight"], 4.15625, "packed zero points"),
        ("8B nf4, double-quantised: bits", weights(LLAMA, "nf4-dq")["bits_per_weight"], 4.127, "QLoRA, appendix"),
        ("8B mxfp4: bits a weight", weights(LLAMA, "mxfp4")["bits_per_weight"], 4.25, "OCP MX v1.0"),
        ("8B nvfp4: bits a weight", weights(LLAMA, "nvfp4")["bits_per_weight"], 4.5, "NVIDIA"),
        ("8B int4, o_proj kept, GB", weights(LLAMA, "int4-g128", keep="*o_proj*")["weight_bytes"] / 1e9, 6.6, "+0.79"),
        ("Qwen3-8B-FP8, GB", weights("Qwen/Qwen3-8B-FP8", "native")["weight_bytes"] / 1e9, 9.44, "its files"),
        ("gpt-oss-20b, GB", weights("openai/gpt-oss-20b", "native")["weight_bytes"] / 1e9, 13.761264768, "total_size"),
        ("DeepSeek-V3, GB", weights("deepseek-ai/DeepSeek-V3", "native")["weight_bytes"] / 1e9, 671, "scales, routers"),
        ("8B int4: decode gain on H100", int4["decode_gain"], 4, "16 / 4 bits; the head and the cache stay"),
        ("8B int4: prefill gain", int4["prefill_gain"], None, "weight-only computes in bf16"),
        ("8B fp8: prefill gain", fp8["prefill_gain"], 2, "1,979 / 989 TFLOP/s; head and attention stay"),
    ]
    print(f"{'quantity':<38}{'ours':>12}{'published':>12}  source")
    for quantity, ours, published, source in lines:
        print(f"{quantity:<38}{ours:>12.4g}{'-' if published is None else f'{published:.4g}':>12}  {source}")


if __name__ == "__main__":
    main()
