"""Vision-language wrappers whose own forward stumbles over a text without images; each with its reason."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

# Llama4ForConditionalGeneration (transformers 5.24) reads `image_outputs` off its text model's output, which has none.
_READS_IMAGE_OUTPUTS = frozenset({"Llama4ForConditionalGeneration"})


@contextmanager
def text_only(model: nn.Module) -> Iterator[None]:
    """Let such a wrapper run on text alone; undone on exit."""
    handles = [
        module.get_submodule("language_model").register_forward_hook(_without_images)
        for module in model.modules()
        if type(module).__name__ in _READS_IMAGE_OUTPUTS
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _without_images(module: nn.Module, args: Any, output: Any) -> None:
    output.image_outputs = None
