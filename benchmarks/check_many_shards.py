"""How long `introspect check` takes for 163 shards with 91,991 tensors: DeepSeek-V3's own headers over sparse files.

    python benchmarks/check_many_shards.py [FOLDER]

Prints wall seconds, processor seconds and peak memory of the whole command, torch's import included. The aim: under
10 s and 1 GB on two cores. A folder that is given keeps the checkpoint (20 MB of headers, no data).
"""

from __future__ import annotations

import json
import os
import resource
import struct
import subprocess
import sys
import tempfile
import time
from math import prod
from pathlib import Path

SHARDS = 163
STORED = {"torch.bfloat16": ("BF16", 2), "torch.float32": ("F32", 4), "torch.float8_e4m3fn": ("F8_E4M3", 1)}
Described = dict[str, tuple[str, int, list[int]]]  # name -> dtype, bytes per element, shape


def tensors() -> Described:
    """Every tensor of the published checkpoint: the model's own by reverting its conversions, and the MTP layer."""
    import torch
    from transformers.core_model_loading import WeightConverter
    from transformers.initialization import no_tie_weights

    from introspect.hooks import loader
    from introspect.hooks.build import build
    from introspect.hooks.quantised import prepare
    from introspect.sources import resolve

    source = resolve("deepseek-ai/DeepSeek-V3")
    with no_tie_weights():
        model = build(source).module
    quantised = prepare(model, source.config, torch.bfloat16)
    assert quantised is not None
    assert quantised.quantiser is not None, quantised
    state = model.state_dict()
    merges = [entry for entry in loader.conversions(model, quantised.quantiser) if isinstance(entry, WeightConverter)]
    for merge in merges:
        merge._was_used = True
    expected = loader.expected_state(model, state, merges)
    found = {name: (*STORED[str(tensor.dtype)], list(tensor.shape)) for name, tensor in expected.items()}
    last = {name: entry for name, entry in found.items() if name.startswith("model.layers.60.")}
    found |= {name.replace("layers.60.", "layers.61."): entry for name, entry in last.items()}
    vocabulary, width = found["lm_head.weight"][2]
    extra = {"eh_proj": [width, 2 * width], "enorm": [width], "hnorm": [width], "shared_head.norm": [width]}
    extra |= {"shared_head.head": [vocabulary, width], "embed_tokens": [vocabulary, width]}
    return found | {f"model.layers.61.{name}.weight": ("BF16", 2, shape) for name, shape in extra.items()}


def write(folder: Path, described: Described) -> None:
    """The shards, sparse, their index and the config."""
    from introspect import catalog

    folder.mkdir(parents=True, exist_ok=True)
    names, weight_map, total = sorted(described), {}, 0
    size = -(-len(names) // SHARDS)
    for shard in range(SHARDS):
        file, at, fields = f"model-{shard + 1:05}-of-{SHARDS:06}.safetensors", 0, {}
        for name in names[shard * size : (shard + 1) * size]:
            dtype, width, shape = described[name]
            fields[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at := at + width * prod(shape)]}
            weight_map[name] = file
        document = json.dumps(fields, separators=(",", ":")).encode()
        document += b" " * (-len(document) % 8)
        with (folder / file).open("wb") as stream:
            stream.write(struct.pack("<Q", len(document)) + document)
            stream.truncate(8 + len(document) + at)
        total += at
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    entry = catalog.find("deepseek-ai/DeepSeek-V3")
    assert entry is not None
    (folder / "config.json").write_bytes(catalog.read(entry.file))


def measure(folder: Path) -> None:
    """Run the command once and print what it took."""
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "introspect", "check", str(folder), "--format", "json"], capture_output=True, check=False
    )
    seconds = time.perf_counter() - start
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    totals = json.loads(done.stdout)["totals"]
    print(f"exit {done.returncode}: {totals['tensors']:,} tensors, {totals['errors']} errors, {totals['notes']} notes")
    print(f"{seconds:.1f} s, {used.ru_utime + used.ru_stime:.1f} processor s, {used.ru_maxrss / 1024:.0f} MiB at most")
    print(f"load of the machine: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")


def main() -> None:
    """Make the checkpoint unless it is there, then measure."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(sys.argv[1] if len(sys.argv) > 1 else temporary, "deepseek-v3-sparse")
        if not (folder / "config.json").exists():
            write(folder, tensors())
        measure(folder)


if __name__ == "__main__":
    main()
