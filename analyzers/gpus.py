"""List the accelerators whose figures are known, with the source of each.

Rates are dense (never the 2:4 sparse figure), with FP32 accumulation where a vendor tells the two apart; bytes are
decimal, interconnect is one direction of one GPU. An empty cell is a figure the vendor does not give. Add your own with
`--gpu-file FILE` or in `introspect/gpus.json` under your configuration folder, in the form of data/gpus.json.
"""

from __future__ import annotations

from dataclasses import dataclass

from introspect.gpus import Gpu, load_gpus
from introspect.params import option
from introspect.table import Result, Table, Value

MODELS = "none"
EXAMPLES = ("introspect gpus", "introspect gpus --gpu-file mine.json --format csv")

UNITS = {
    "gpu": "",
    "memory_bytes": "B",
    "bandwidth_bytes_per_second": "B/s",
    "fp32_flops_per_second": "FLOP/s",
    "tf32_flops_per_second": "FLOP/s",
    "fp16_flops_per_second": "FLOP/s",
    "bf16_flops_per_second": "FLOP/s",
    "fp8_flops_per_second": "FLOP/s",
    "int8_ops_per_second": "OP/s",
    "fp4_flops_per_second": "FLOP/s",
    "bf16_ridge_flop_per_byte": "FLOP/B",
    "interconnect": "",
    "interconnect_bytes_per_second": "B/s",
    "aliases": "",
    "note": "",
    "source": "",
    "retrieved": "",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Params:
    """Which file adds to the built-in rows."""

    gpu_file: str | None = option(None, "JSON file with more GPUs", metavar="FILE")


def analyze(params: Params) -> Result:
    """One row a GPU, built in first."""
    rows = tuple(_row(gpu) for gpu in load_gpus(params.gpu_file).values())
    return Result(command="gpus", tables={"gpus": Table(units=UNITS, rows=rows)})


def _row(gpu: Gpu) -> dict[str, Value]:
    return {
        "gpu": gpu.name,
        "memory_bytes": gpu.memory_bytes,
        "bandwidth_bytes_per_second": gpu.bandwidth_bytes_per_second,
        "fp32_flops_per_second": gpu.peak("fp32"),
        "tf32_flops_per_second": gpu.peak("tf32"),
        "fp16_flops_per_second": gpu.peak("fp16"),
        "bf16_flops_per_second": gpu.peak("bf16"),
        "fp8_flops_per_second": gpu.peak("fp8"),
        "int8_ops_per_second": gpu.peak("int8"),
        "fp4_flops_per_second": gpu.peak("fp4"),
        "bf16_ridge_flop_per_byte": gpu.ridge("bf16"),
        "interconnect": gpu.interconnect,
        "interconnect_bytes_per_second": gpu.interconnect_bytes_per_second,
        "aliases": ", ".join(gpu.aliases),
        "note": gpu.note,
        "source": gpu.source_url,
        "retrieved": gpu.retrieved,
    }
