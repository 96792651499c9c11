"""No bound may exceed what a real run takes: measure this CPU, bound a small Llama on it, run it, compare.

    python benchmarks/bounds_on_cpu.py

Peak: the best of square fp32 products. Bandwidth: the best of reading, copying and a matrix times a vector, on arrays
far larger than the caches. The model's weights are larger than the caches too, so that decode has to read them from
memory. Each measured time is the best of several. Exits with 1 when a bound exceeds its run.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import introspect

CONFIG = LlamaConfig(
    hidden_size=1536,
    intermediate_size=4096,
    num_hidden_layers=6,
    num_attention_heads=12,
    num_key_value_heads=4,
    vocab_size=16384,
)
RUNS = (
    {"phase": "prefill", "seq": 256},
    {"phase": "prefill", "seq": 64, "batch": 4},
    {"phase": "decode", "context": 512},
    {"phase": "decode", "context": 512, "batch": 16},
)
REPEATS = 5


def best_seconds(run: Callable[[], object]) -> float:
    """The shortest of several runs, after one that is not counted."""
    run()
    times = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return min(times)


def measured_peak() -> float:
    """FLOP/s of the best square fp32 product."""
    rates = []
    for n in (512, 1024, 2048, 3072):
        a, b = torch.randn(n, n), torch.randn(n, n)
        rates.append(2 * n**3 / best_seconds(lambda a=a, b=b: a @ b))
    return max(rates)


def measured_bandwidth() -> float:
    """Bytes a second of the best way to stream 512 MB."""
    rows = torch.randn(16384, 8192)
    vector, target = torch.randn(8192), torch.empty_like(rows)
    return max(
        rows.nbytes / best_seconds(rows.sum),
        rows.nbytes / best_seconds(lambda: rows @ vector),
        2 * rows.nbytes / best_seconds(lambda: target.copy_(rows)),
    )


def gpu_file(peak: float, bandwidth: float) -> str:
    """A --gpu-file with this CPU as its only row."""
    row = {
        "memory_bytes": 16e9,
        "bandwidth_bytes_per_second": bandwidth,
        "dense_peak_per_second": {"fp32": peak},
        "note": "measured by benchmarks/bounds_on_cpu.py",
        "source_url": "https://docs.pytorch.org/docs/stable/benchmark_utils.html",
        "retrieved": "2026-11-29",
    }
    path = Path(tempfile.mkdtemp()) / "cpu.json"
    path.write_text(json.dumps({"gpus": {"this-cpu": row}}))
    return str(path)


def step_seconds(model: LlamaForCausalLM, run: dict[str, object]) -> float:
    """The best time of a real step; the prompt that fills the cache is not counted."""
    batch = int(str(run.get("batch", 1)))
    if run["phase"] == "prefill":
        ids = torch.randint(1, 1000, (batch, int(str(run["seq"]))))
        return best_seconds(lambda: model(ids, use_cache=True, logits_to_keep=1))
    context = int(str(run["context"]))
    cache = DynamicCache(config=model.config)
    model(torch.randint(1, 1000, (batch, context)), cache=cache)
    token = torch.randint(1, 1000, (batch, 1))

    def step() -> None:
        model(token, cache=cache)
        cache.crop(-1)

    return best_seconds(step)


def main() -> int:
    """Print a line for each run and say whether every bound holds."""
    torch.manual_seed(0)
    with torch.no_grad():
        peak, bandwidth = measured_peak(), measured_bandwidth()
        print(f"measured: {peak / 1e9:.0f} GFLOP/s fp32, {bandwidth / 1e9:.1f} GB/s, {torch.get_num_threads()} threads")
        hardware = {"gpu": "this-cpu", "gpu_file": gpu_file(peak, bandwidth)}
        model = LlamaForCausalLM(CONFIG).eval()
        failures = 0
        for run in RUNS:
            taken = step_seconds(model, run)
            result = introspect.analyze("roofline", model, measured=taken, no_cache=True, **hardware, **run)
            (row,) = result.tables["gpus"].rows
            holds = row["seconds_floor"] <= taken and row["seconds"] <= taken
            failures += not holds
            name = " ".join(f"{key}={value}" for key, value in run.items())
            print(
                f"{name}: floor {1e3 * row['seconds_floor']:.1f} ms, bound {1e3 * row['seconds']:.1f} ms "
                f"({row['bound']}), real {1e3 * taken:.1f} ms, MFU {row['measured_mfu']:.2f}, "
                f"MBU {row['measured_mbu']:.2f}: {'holds' if holds else 'EXCEEDS'}"
            )
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
