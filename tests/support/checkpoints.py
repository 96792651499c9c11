"""Small real checkpoints of transformers models, made once in a temporary folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from support.tiny import build


def save_tiny(folder: Path, name: str, *, dtype: torch.dtype = torch.bfloat16, **sizes: Any) -> Path:
    """A model with random weights, saved by transformers itself: config.json and safetensors files."""
    model = build(name, device="cpu", dtype=dtype, **sizes)
    model.config.dtype = dtype
    model.save_pretrained(folder, max_shard_size="1GB")
    return folder
