"""Sharded tiny models on real gloo processes: each rank records itself and writes down what it did.

    python -m support.ranks FOLDER RANK RANKS      (tests/ on the path; run_ranks starts them all)

The processes meet in a file of FOLDER. Every token goes to every expert, so that routing is the same whatever the
random weights say.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from support.tiny import IDENTITY, build
from transformers.initialization import no_tie_weights

from introspect.hooks.observe import observe
from introspect.hooks.sharding import meshes, observe_sharded, shard
from introspect.records import RunShape, Trace

QWEN3_MOE = {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 4, "moe_intermediate_size": 32}
DEEPSEEK = {
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 4,
    "n_group": 2,
    "topk_group": 2,
    "moe_intermediate_size": 32,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"num_key_value_heads": 4}),
    "qwen3_moe": ("Qwen3Moe", QWEN3_MOE | {"num_key_value_heads": 4}),
    "deepseek": ("DeepseekV3", DEEPSEEK),
}
PHASES = {
    "prefill": {"phase": "prefill", "seq": 8, "batch": 4},
    "decode": {"phase": "decode", "seq": 1, "context": 8, "batch": 4},
    "train": {"phase": "train", "seq": 8, "batch": 4},
}
CASES = {
    2: (
        ("llama", 2, 1, "prefill"),
        ("llama", 2, 1, "decode"),
        ("llama", 2, 1, "train"),
        ("qwen3_moe", 2, 1, "decode"),
        ("qwen3_moe", 1, 2, "prefill"),
        ("qwen3_moe", 2, 2, "decode"),
        ("deepseek", 2, 1, "decode"),
        ("deepseek", 1, 2, "prefill"),
    ),
    4: (
        ("llama", 4, 1, "prefill"),
        ("llama", 4, 1, "decode"),
        ("llama", 4, 1, "train"),
        ("qwen3_moe", 4, 1, "prefill"),
        ("qwen3_moe", 1, 4, "decode"),
        ("qwen3_moe", 2, 4, "prefill"),
        ("qwen3_moe", 4, 4, "prefill"),
        ("deepseek", 4, 1, "prefill"),
        ("deepseek", 2, 4, "decode"),
        ("deepseek", 1, 4, "prefill"),
    ),
}
"""Cases by number of processes: model, tensor ranks, expert ranks, phase."""


def run_of(tp: int, ep: int, phase: str) -> RunShape:
    """The run shape of a case."""
    return RunShape(**PHASES[phase], tp=tp, ep=ep)


def facts(trace: Trace) -> dict[str, Any]:
    """What must be equal: local shapes, products, cache and collectives of one rank, as JSON."""
    products: Counter[str] = Counter()
    collectives: Counter[str] = Counter()
    for op, times in trace.walk():
        for gemm in op.gemms:
            sizes = (gemm.kind, gemm.direction, gemm.batch, gemm.m, gemm.k, gemm.n, gemm.rows)
            products[f"{op.module} {sizes}"] += times
        if op.collective is not None:
            one = op.collective
            found = (one.kind, one.payload_bytes, one.group, one.ranks, op.backward)
            collectives[f"{op.module} {found}"] += times
    return {
        "parameters": {p.path: [list(p.shape), p.global_shape and list(p.global_shape)] for p in trace.parameters},
        "products": dict(products),
        "collectives": dict(collectives),
        "cache": [[t.layer, t.name, list(t.shape_before or ()), list(t.shape_after or ())] for t in trace.cache],
    }


def predicted(case: tuple[str, int, int, str], rank: int) -> dict[str, Any]:
    """The facts of one rank in a fake group, on meta."""
    model, tp, ep, phase = case
    name, sizes = MODELS[model]
    return as_json(facts(observe_sharded(build(name, **sizes), run_of(tp, ep, phase), rank)))


def as_json(value: dict[str, Any]) -> dict[str, Any]:
    """The value as it comes back from a file."""
    return json.loads(json.dumps(value))


def executed(case: tuple[str, int, int, str]) -> dict[str, Any]:
    """The facts of this process's rank, with real weights on the CPU."""
    model, tp, ep, phase = case
    name, sizes = MODELS[model]
    run = run_of(tp, ep, phase)
    with no_tie_weights():
        module = build(name, device="cpu", **sizes)
        shard(module, run, meshes(tp, ep))
    return facts(observe(module, IDENTITY, run))


def run_ranks(folder: Path, ranks: int) -> list[list[dict[str, Any]]]:
    """Start that many processes and return, for each rank, the facts of each case."""
    tests = str(Path(__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": tests, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "support.ranks", str(folder)]
    started = [
        subprocess.Popen(
            [*command, str(rank), str(ranks)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        for process in started:
            talk, _ = process.communicate(timeout=600)
            assert process.returncode == 0, talk
    finally:
        for process in started:
            process.kill()
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]


def main() -> None:
    """One rank: run every case of this number of processes and write the facts."""
    folder, rank, ranks = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=ranks)
    try:
        (folder / f"{rank}.json").write_text(json.dumps([executed(case) for case in CASES[ranks]]))
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
