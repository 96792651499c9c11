"""What a checkpoint's own quantisation makes of a model, as a value: filled by hooks/native_format.py with torch, read
without it."""

from __future__ import annotations

from dataclasses import dataclass

from introspect.formats import StoredTensor


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredParameter:
    """A parameter of the model and the tensors stored for it. `compute`: as in Format, the type of its products."""

    parameter: str
    tensors: tuple[StoredTensor, ...]
    compute: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeFormat:
    """Every parameter that is not stored as the logical model has it.

    `method`: quant_method as the config names it; `route`: how the stored tensors are known; `kv_dtype`: the cache
    format the config asks for (None: none). `problem`: why nothing is known, and then `parameters` is empty.
    """

    method: str
    route: str
    parameters: tuple[StoredParameter, ...] = ()
    kv_dtype: str | None = None
    problem: str | None = None
    notes: tuple[str, ...] = ()
