"""How many parameters, where they are, and how many a token uses: our numbers beside the published ones.

python examples/parameters.py
"""

import introspect

PUBLISHED = (
    ("meta-llama/Meta-Llama-3-8B", "total", 8_030_261_248, "model card's safetensors total"),
    ("meta-llama/Meta-Llama-3-70B", "total", 70_553_706_496, "model card's safetensors total"),
    ("meta-llama/Meta-Llama-3.1-405B", "total", 405_853_388_800, "model card's safetensors total"),
    ("meta-llama/Llama-3.2-1B", "total", 1_235_814_400, "tied embedding, counted once"),
    ("mistralai/Mixtral-8x7B-v0.1", "total", 46_702_792_704, "46.7 B in Mixtral of Experts"),
    ("mistralai/Mixtral-8x7B-v0.1", "active", 12_879_925_248, "12.9 B in Mixtral of Experts"),
    ("deepseek-ai/DeepSeek-V3", "total", 671_026_404_352, "671 B in the DeepSeek-V3 report"),
    ("deepseek-ai/DeepSeek-V3", "active", 37_552_282_624, "37 B in the DeepSeek-V3 report"),
    ("openai/gpt-oss-20b", "total", 20_914_757_184, "20.9 B in the gpt-oss model card"),
)


def main() -> None:
    """Print one line a figure: ours, the published one, and where it is published."""
    print(f"{'model':<32}{'':<8}{'ours':>18}{'published':>18}  source")
    for model, name, published, source in PUBLISHED:
        ours = introspect.analyze("params", model, seq=16).totals[name]
        print(f"{model:<32}{name:<8}{ours:>18,}{published:>18,}  {source}")


if __name__ == "__main__":
    main()
