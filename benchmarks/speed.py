"""How fast introspect is, as ratios measured in one run: python benchmarks/speed.py [--runs 5]

- a first `introspect trace` against a bare script that imports the same class and builds it on meta (wanted: 1.3x)
- recording against the bare meta forward of the same model (wanted: 1.5x)
- the record of a training step of Llama-3-70B (wanted: 20 s)
- `introspect --help` and an answer from a stored trace (wanted: 0.3 s, no torch)
- peak resident memory of DeepSeek-V3 and Llama-3.1-405B (wanted: 1 GB)

Each pair is run alternately, and medians are compared: the speed of a shared machine drifts.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

LLAMA = "meta-llama/Meta-Llama-3-8B"
BARE = """
import torch
from accelerate import init_empty_weights
from transformers import LlamaConfig, LlamaForCausalLM
from introspect.sources import resolve
config = LlamaConfig(**resolve("meta-llama/Meta-Llama-3-8B").config)
with init_empty_weights(include_buffers=True):
    LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)
"""
MEMORY = """
import resource, introspect
introspect.trace({model!r}, phase={phase!r}, cache=False)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def main() -> None:
    """Measure everything and print one line for each figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5, help="runs of each command, after one warm-up")
    runs = parser.parse_args().runs
    with tempfile.TemporaryDirectory() as store:
        os.environ["INTROSPECT_CACHE"] = store
        cold(runs)
        stored(runs)
    recording(runs)
    memory()


def cold(runs: int) -> None:
    """A first trace against the bare script."""
    for phase in ("prefill", "decode"):
        ours = [sys.executable, "-m", "introspect", "trace", LLAMA, "--phase", phase, "--no-cache"]
        bare, first = alternately([sys.executable, "-c", BARE], ours, runs)
        print(f"cold trace, {phase}: {first:.2f} s, bare script {bare:.2f} s, ratio {first / bare:.2f} (wanted 1.3)")


def stored(runs: int) -> None:
    """The help, and an answer from the store."""
    command = [sys.executable, "-m", "introspect", "trace", LLAMA, "--phase", "decode"]
    quietly(command)
    for name, args in (("--help", [sys.executable, "-m", "introspect", "--help"]), ("stored answer", command)):
        print(f"{name}: {statistics.median(seconds(args) for _ in range(runs)):.2f} s (wanted 0.3)")


def recording(runs: int) -> None:
    """Recording a prefill against the bare forward, inside one process."""
    import torch
    from transformers import logging

    from introspect.hooks.build import build
    from introspect.hooks.observe import observe
    from introspect.records import RunShape
    from introspect.sources import resolve

    logging.set_verbosity_error()
    for name in (LLAMA, "mistralai/Mixtral-8x7B-v0.1", "deepseek-ai/DeepSeek-V3", "meta-llama/Meta-Llama-3.1-405B"):
        built = build(resolve(name))
        ids = torch.zeros((1, 2048), dtype=torch.int64, device="meta")

        def bare(model: torch.nn.Module = built.module, ids: torch.Tensor = ids) -> None:
            with torch.no_grad():
                model(input_ids=ids, use_cache=True)

        def recorded(model: torch.nn.Module = built.module, identity: object = built.identity) -> None:
            observe(model, identity, RunShape(seq=2048))  # type: ignore[arg-type]  # a ModelIdentity

        plain, ours = timed_alternately(bare, recorded, runs)
        print(f"recording {name}: {ours:.2f} s, bare forward {plain:.2f} s, ratio {ours / plain:.2f} (wanted 1.5)")
    large = build(resolve("meta-llama/Meta-Llama-3-70B"))
    for checkpointing in (False, True):
        start = time.perf_counter()
        observe(large.module, large.identity, RunShape(phase="train", seq=2048, checkpointing=checkpointing))
        again = ", layers recomputed" if checkpointing else ""
        print(f"training step of Llama-3-70B{again}: {time.perf_counter() - start:.2f} s (wanted 20)")


def memory() -> None:
    """Peak resident memory of a whole process."""
    for model, phase in (("deepseek-ai/DeepSeek-V3", "decode"), ("meta-llama/Meta-Llama-3.1-405B", "prefill")):
        code = MEMORY.format(model=model, phase=phase)
        kilobytes = int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout)
        print(f"peak memory of {model} {phase}: {kilobytes / 1e6:.2f} GB (wanted 1)")


def alternately(first: list[str], second: list[str], runs: int) -> tuple[float, float]:
    """Median seconds of two commands that take turns."""
    return timed_alternately(lambda: quietly(first), lambda: quietly(second), runs)


def timed_alternately(first: Callable[[], object], second: Callable[[], object], runs: int) -> tuple[float, float]:
    """Median seconds of two functions that take turns, after one run of each that does not count."""
    times: tuple[list[float], list[float]] = ([], [])
    for run in range(runs + 1):
        for function, found in zip((first, second), times, strict=True):
            start = time.perf_counter()
            function()
            if run:
                found.append(time.perf_counter() - start)
    return statistics.median(times[0]), statistics.median(times[1])


def seconds(command: list[str]) -> float:
    """Wall seconds of one command."""
    start = time.perf_counter()
    quietly(command)
    return time.perf_counter() - start


def quietly(command: list[str]) -> None:
    """Run a command that must succeed, without its output."""
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


if __name__ == "__main__":
    main()
