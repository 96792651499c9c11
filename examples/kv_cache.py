"""What the cache of a model holds and how much of it fits: our numbers beside the published ones.

python examples/kv_cache.py
"""

import introspect

KIB, GIB = 2**10, 2**30


def main() -> None:
    """Print one line a quantity: ours, the published figure, and where it is published."""
    llama = introspect.analyze("kv", "meta-llama/Meta-Llama-3-8B", context=131072)
    fits = introspect.analyze("kv", "meta-llama/Meta-Llama-3-8B", context=8192).tables["capacity"].rows[0]
    big = introspect.analyze("kv", "meta-llama/Meta-Llama-3-70B", context=131072).totals
    deepseek = introspect.analyze("kv", "deepseek-ai/DeepSeek-V3", context=131072)
    oss = introspect.analyze("kv", "openai/gpt-oss-20b", context=8192).totals
    gemma = introspect.analyze("kv", "google/gemma-2b").totals
    intensity = deepseek.tables["layers"].rows[0]["decode_flop_per_byte"]
    ratio = deepseek.totals["bytes_per_token_as_mha"] / deepseek.totals["bytes_per_token"]
    loses = deepseek.totals["absorption_loses_from_query_length"]
    lines = [
        ("Llama-3-8B: KiB a token", llama.totals["bytes_per_token"] / KIB, 128, "2 x 32 layers x 8 heads x 128 x 2 B"),
        ("  as multi-head attention: KiB", llama.totals["bytes_per_token_as_mha"] / KIB, 512, "32 heads instead of 8"),
        ("  at 128K tokens: GiB", llama.totals["bytes_at_context"] / GIB, 16, "128 KiB x 131072"),
        ("  8K sequences beside it on 80 GB", fits["max_sequences"], 59, "(80 - 16.06) GB / 1.07 GB"),
        ("Llama-3-70B: KiB a token", big["bytes_per_token"] / KIB, 320, "80 layers"),
        ("  at 128K tokens: GiB", big["bytes_at_context"] / GIB, 40, "320 KiB x 131072"),
        (
            "DeepSeek-V3: kB a token",
            deepseek.totals["bytes_per_token"] / 1e3,
            70.272,
            "DeepSeek-V3 report: 576 x 2 B x 61",
        ),
        ("  smaller than multi-head by", ratio, 57, "takes 128 for keys too; they are 192 wide"),
        ("  absorbed decode: FLOP a byte", intensity, 242, "128 x (576 + 512) / 576"),
        ("  absorption loses from, tokens", loses, 171, "for a long context: 512 x 256 / 768"),
        ("gpt-oss-20b at 8K: MB", oss["bytes_at_context"] / 1e6, 204.5, "12 layers of 8192 rows, 12 of 128 (127 kept)"),
        (
            "  reserved by a paged engine: MB",
            oss["reserved_bytes_at_context"] / 1e6,
            402.7,
            "all 24 layers of 8192 rows",
        ),
        ("Gemma-2B: KiB a token", gemma["bytes_per_token"] / KIB, 18, "one key/value head of 256, 18 layers"),
    ]
    print(f"{'quantity':<38}{'ours':>12}{'published':>12}  source")
    for quantity, ours, published, source in lines:
        print(f"{quantity:<38}{ours:>12.4g}{published:>12.4g}  {source}")


if __name__ == "__main__":
    main()
