"""A corrected checkpoint index, from what the headers really say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from introspect.atomic import write_atomically
from introspect.checkpoint import Checkpoint
from introspect.errors import CheckpointError, OptionError


def write_fixed_index(checkpoint: Checkpoint, path: Path) -> str:
    """Write the index of a checkpoint whose headers were all read to a new file; its name.

    Raises OptionError when the file exists, CheckpointError when the checkpoint cannot be told completely.
    """
    if path.exists() or path.is_symlink():
        raise OptionError("--fix-index", str(path), "a file that does not exist yet")
    if checkpoint.kind == "index":
        raise CheckpointError(
            checkpoint.source, "only an index, no headers", "give the folder or Hub id with the shards"
        )
    if checkpoint.unread:
        files = ", ".join(unread.file for unread in checkpoint.unread[:3])
        raise CheckpointError(checkpoint.source, f"no header of {files}", "an index without it would lose its tensors")
    write_atomically(path, json.dumps(fixed_index(checkpoint), indent=2) + "\n")
    return str(path)


def fixed_index(checkpoint: Checkpoint) -> dict[str, Any]:
    """The index as JSON: each tensor in the shard that holds it, total_size as the sum of their bytes.

    A tensor of several shards stays where the old index has it if it is there, else it goes to the first shard by name.
    Other metadata of the old index is kept.
    """
    old = checkpoint.index.weight_map if checkpoint.index else {}
    weight_map: dict[str, str] = {}
    sizes: dict[str, int] = {}
    for header in sorted(checkpoint.headers, key=lambda header: header.file):
        for tensor in header.tensors:
            if tensor.name not in weight_map or old.get(tensor.name) == header.file:
                weight_map[tensor.name] = header.file
                sizes[tensor.name] = tensor.bytes
    metadata = dict(checkpoint.index.metadata) if checkpoint.index else {}
    metadata["total_size"] = sum(sizes.values())
    return {"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))}
