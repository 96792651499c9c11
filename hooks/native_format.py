"""What a checkpoint's own quantisation stores, for the commands that compare formats.

torch is imported only for a model whose config is quantised: every other answer stays quick.
"""

from __future__ import annotations

from typing import Any

from introspect.native_record import NativeFormat
from introspect.sources import Source
from introspect.traces import Live, Stored


def gather(params: Any, opened: Stored | Live) -> NativeFormat | None:
    """The checkpoint's own format; None when nothing says that it is quantised."""
    source = source_of(opened)
    if source is None or not _is_quantised(source):
        return None
    from introspect.hooks.stored_weights import stored_weights

    return stored_weights(source)


def source_of(opened: Stored | Live) -> Source | None:
    """Where the model's config came from; a stored record carries it. None for a plain module."""
    if isinstance(opened, Live):
        return opened.model if isinstance(opened.model, Source) else None
    identity = opened.trace.model
    if not identity.config:
        return None
    return Source(
        id=identity.id,
        kind="object",
        text=identity.source,
        config={name: value for name, value in identity.config.items() if name != "hf_quant_config"},
        config_sha256=identity.config_sha256,
        digest=identity.config_sha256,
        hf_quant_config=identity.config.get("hf_quant_config"),
    )


def _is_quantised(source: Source) -> bool:
    parts = (source.config, source.config.get("text_config") or {})
    return source.hf_quant_config is not None or any("quantization_config" in part for part in parts)
