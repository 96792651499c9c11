"""The tables of `shard`: parameters, collectives, tiles, GPUs, stages, and the two routes side by side."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from math import prod

from introspect.analyzers._collectives import Transfer
from introspect.analyzers._folding import LayerPaths, layer_ranges
from introspect.analyzers._gemm_table import gemm_table
from introspect.analyzers._pipeline import Stage
from introspect.analyzers._products import Product
from introspect.analyzers._rank import Rank, Share
from introspect.analyzers._roofline import Machine
from introspect.table import Table, Value

PARAMETER_UNITS = {
    "parameter": "",
    "layers": "",
    "count": "",
    "whole_shape": "",
    "shape": "",
    "dtype": "",
    "sharded_bytes": "B",
    "replicated_bytes": "B",
    "copies": "",
}
COLLECTIVE_UNITS = {
    "kind": "",
    "module": "",
    "layers": "",
    "direction": "",
    "group": "",
    "ranks": "",
    "algorithm": "",
    "steps": "",
    "count": "",
    "bytes_each": "B",
    "wire_bytes_each": "B",
    "bytes": "B",
    "wire_bytes_per_rank": "B",
}
TIME_UNITS = {
    "gpu": "",
    "kind": "",
    "module": "",
    "count": "",
    "seconds": "s",
    "gemm_seconds": "s",
    "ratio": "",
}
GPU_UNITS = {
    "gpu": "",
    "gemm_seconds": "s",
    "collective_seconds": "s",
    "collective_share": "share",
    "fits": "",
    "free_bytes": "B",
    "max_kv_tokens": "tokens",
}
TILE_UNITS = {
    "module": "",
    "dimension": "",
    "size": "",
    "over_64": "",
    "over_128": "",
    "waste_64": "share",
    "waste_128": "share",
}
STAGE_UNITS = {
    "stage": "",
    "layers": "",
    "weight_bytes": "B",
    "kv_bytes_per_token": "B",
    "flops": "FLOP",
    "gemm_seconds": "s",
    "collective_seconds": "s",
    "share": "share",
}
ROUTE_UNITS = {"quantity": "", "transformers": "", "megatron": "", "same": ""}


def parameter_table(rank: Rank, ranks: int) -> Table:
    """Equal parameters of equal layers in one row; bytes are of all of them on this rank: its own part, and what
    every rank holds, or several (KV heads that are fewer than the ranks). `copies` of each that all ranks hold
    together: 1 when they only share it out, slightly more where equal parts need padding."""
    layers = rank.step.structure.layers
    rows: defaultdict[tuple[object, ...], list[Share]] = defaultdict(list)
    for share in rank.shares:
        rows[layers.split(share.parameter.path)[0], share.whole_shape, share.shape, share.parameter.dtype].append(share)
    return Table(
        units=PARAMETER_UNITS,
        rows=tuple(
            {
                "parameter": layers.split(same[0].parameter.path)[0],
                "layers": layer_ranges(layers.split(share.parameter.path)[1] for share in same),
                "count": len(same),
                "whole_shape": list(same[0].whole_shape),
                "shape": list(same[0].shape),
                "dtype": same[0].parameter.dtype,
                "sharded_bytes": sum(share.bytes - share.replicated_bytes for share in same),
                "replicated_bytes": sum(share.replicated_bytes for share in same),
                "copies": prod(same[0].shape) * ranks / prod(same[0].whole_shape),
            }
            for same in rows.values()
        ),
    )


def collective_table(transfers: Iterable[Transfer], layers: LayerPaths) -> Table:
    """Equal transfers of equal layers in one row. `bytes_each` and `wire_bytes_each` are of one of them: what a layer
    moves."""
    rows: defaultdict[tuple[object, ...], list[Transfer]] = defaultdict(list)
    for transfer in transfers:
        key = (transfer.kind, _folded(transfer.module, layers), transfer.direction, transfer.group)
        rows[*key, transfer.ranks, transfer.payload_bytes].append(transfer)
    return Table(units=COLLECTIVE_UNITS, rows=tuple(_collective_row(same, layers) for same in rows.values()))


def _collective_row(same: list[Transfer], layers: LayerPaths) -> dict[str, Value]:
    first, count = same[0], sum(transfer.times for transfer in same)
    return {
        "kind": first.kind,
        "module": _folded(first.module, layers),
        "layers": layer_ranges(layers.split(transfer.module.split(" + ")[0])[1] for transfer in same),
        "direction": first.direction,
        "group": first.group,
        "ranks": first.ranks,
        "algorithm": first.algorithm,
        "steps": first.steps,
        "count": count,
        "bytes_each": first.payload_bytes,
        "wire_bytes_each": first.wire_bytes,
        "bytes": count * first.payload_bytes,
        "wire_bytes_per_rank": count * first.wire_bytes,
    }


def _folded(module: str, layers: LayerPaths) -> str:
    return " + ".join(layers.split(one)[0] for one in module.split(" + "))


def time_table(rank: Rank, machines: Sequence[Machine]) -> Table:
    """Each collective's least time beside that of the products whose result it moves."""
    layers = rank.step.structure.layers
    rows: defaultdict[tuple[str, str], list[Transfer]] = defaultdict(list)
    for transfer in rank.transfers:
        rows[transfer.kind, _folded(transfer.module, layers)].append(transfer)
    return Table(
        units=TIME_UNITS,
        rows=tuple(_time_row(rank, same, machine) for machine in machines for same in rows.values()),
    )


def _time_row(rank: Rank, same: list[Transfer], machine: Machine) -> dict[str, Value]:
    layers = rank.step.structure.layers
    modules = {module for transfer in same for module in transfer.module.split(" + ")}
    times = [(transfer.seconds(machine.gpu), transfer.times) for transfer in same]
    seconds = None if any(one is None for one, _ in times) else sum((one or 0.0) * count for one, count in times)
    bounds = [work.seconds(machine) for work in rank.works if work.module in modules or _owner(work.module) in modules]
    gemms = None if None in bounds else sum(bound for bound in bounds if bound is not None)
    return {
        "gpu": machine.gpu.name,
        "kind": same[0].kind,
        "module": _folded(same[0].module, layers),
        "count": sum(transfer.times for transfer in same),
        "seconds": seconds,
        "gemm_seconds": gemms,
        "ratio": seconds / gemms if seconds is not None and gemms else None,
    }


def _owner(module: str) -> str:
    """The module of a product that is named after its weight."""
    return module.rpartition(".")[0]


def gpu_table(stage: Stage, machines: Sequence[Machine]) -> Table:
    """Time and room of one rank on each GPU; collectives not overlapped with products."""
    rows: list[dict[str, Value]] = []
    for machine in machines:
        gemms, transfers = stage.gemm_seconds(machine), stage.transfer_seconds(machine)
        both = None if gemms is None or transfers is None else gemms + transfers
        free = int(machine.memory_bytes) - stage.rank.weight_bytes
        grown = stage.rank.kv_bytes_per_token
        rows.append(
            {
                "gpu": machine.gpu.name,
                "gemm_seconds": gemms,
                "collective_seconds": transfers,
                "collective_share": transfers / both if transfers is not None and both else None,
                "fits": free >= 0,
                "free_bytes": free,
                "max_kv_tokens": max(0, free) // grown if grown else None,
            }
        )
    return Table(units=GPU_UNITS, rows=tuple(rows))


def tile_table(products: Iterable[Product], layers: LayerPaths) -> Table:
    """Local n and k of weight products that are no multiple of 64 or 128: what the last tile wastes."""
    rows: dict[tuple[str, str, int], dict[str, Value]] = {}
    for product in products:
        for dimension, size in (("k", product.k), ("n", product.n)) if product.weights else ():
            if size % 128:
                module = layers.split(product.module)[0]
                rows[module, dimension, size] = {
                    "module": module,
                    "dimension": dimension,
                    "size": size,
                    "over_64": size % 64,
                    "over_128": size % 128,
                    "waste_64": 1 - size / (-(-size // 64) * 64),
                    "waste_128": 1 - size / (-(-size // 128) * 128),
                }
    return Table(units=TILE_UNITS, rows=tuple(rows.values()))


def stage_table(stages: Sequence[Stage], machine: Machine) -> Table:
    """Each stage's load; `share` is of the time of all stages."""
    times = [stage.seconds(machine) for stage in stages]
    total = None if None in times else sum(time for time in times if time is not None)
    return Table(
        units=STAGE_UNITS,
        rows=tuple(
            {
                "stage": number,
                "layers": stage.layers,
                "weight_bytes": stage.rank.weight_bytes,
                "kv_bytes_per_token": stage.rank.kv_bytes_per_token,
                "flops": sum(work.flops for work in stage.rank.works),
                "gemm_seconds": stage.gemm_seconds(machine),
                "collective_seconds": stage.transfer_seconds(machine),
                "share": time / total if time is not None and total else None,
            }
            for number, (stage, time) in enumerate(zip(stages, times, strict=True))
        ),
    )


def route_table(executed: Rank, megatron: Rank) -> Table:
    """What each route makes of the step: the sizes of one rank, its collectives, and every product that differs."""
    rows: list[dict[str, Value]] = []

    def compare(quantity: str, ours: Value, theirs: Value) -> None:
        rows.append({"quantity": quantity, "transformers": ours, "megatron": theirs, "same": ours == theirs})

    compare("weight_bytes_per_rank", executed.weight_bytes, megatron.weight_bytes)
    compare("weight_bytes_replicated_per_rank", executed.replicated_bytes, megatron.replicated_bytes)
    compare("kv_bytes_per_token_per_rank", executed.kv_bytes_per_token, megatron.kv_bytes_per_token)
    compare("query_heads_per_rank", executed.query_heads, megatron.query_heads)
    compare("kv_heads_per_rank", executed.kv_heads, megatron.kv_heads)
    counts = [_counts(rank.transfers) for rank in (executed, megatron)]
    for kind in sorted({*counts[0], *counts[1]}):
        compare(kind, counts[0].get(kind, "none"), counts[1].get(kind, "none"))
    sizes = [_sizes(rank) for rank in (executed, megatron)]
    for module in dict.fromkeys((*sizes[0], *sizes[1])):
        ours, theirs = sizes[0].get(module, "none"), sizes[1].get(module, "none")
        if ours != theirs:
            compare(module, ours, theirs)
    return Table(units=ROUTE_UNITS, rows=tuple(rows))


def _counts(transfers: Iterable[Transfer]) -> dict[str, str]:
    found: defaultdict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0])
    for transfer in transfers:
        entry = found[transfer.kind, transfer.direction]
        entry[0] += transfer.times
        entry[1] += transfer.times * transfer.payload_bytes
    return {f"{kind} {direction}": f"{count} of {size:,} B" for (kind, direction), (count, size) in found.items()}


def _sizes(rank: Rank) -> dict[str, str]:
    """Sizes of the products of each folded module and direction."""
    found: dict[str, list[str]] = {}
    for row in gemm_table(rank.products, rank.step.structure.layers).rows:
        size = f"{row['count']} x {row['m']}x{row['k']}x{row['n']}"
        batched = f"{size} of {row['batch']}" if row["batch"] != 1 else size
        found.setdefault(f"{row['module']} {row['kind']} {row['direction']}", []).append(batched)
    return {module: ", ".join(sorted(sizes)) for module, sizes in found.items()}
