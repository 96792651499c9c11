"""meta_kernels: a remembered result has the layout its kernel gives, and only where it may be remembered."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.architectures import architecture

from introspect.hooks.meta_kernels import MetaKernels
from introspect.hooks.observe import observe
from introspect.hooks.shrink import IDENTITY, build_on_meta
from introspect.records import RunShape

aten = torch.ops.aten


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


CALLS: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
    (aten.mm.default, (meta(3, 4), meta(4, 5)), {}),
    (aten.mul.Tensor, (meta(3, 4).t(), meta(4, 1)), {}),
    (aten.mul.Tensor, (meta(3, dtype=torch.int64), 2), {}),
    (aten.mul.Tensor, (meta(3, dtype=torch.int64), 2.0), {}),
    (aten.mul.Tensor, (meta(3, dtype=torch.bool), True), {}),
    (aten._to_copy.default, (meta(2, 3),), {"dtype": torch.float32}),
    (aten._to_copy.default, (meta(2, 3),), {"dtype": torch.float16}),
    (aten.clone.default, (meta(2, 3, 4).transpose(0, 2),), {"memory_format": torch.contiguous_format}),
    (aten.clone.default, (meta(2, 3, 4).transpose(0, 2),), {"memory_format": torch.preserve_format}),
    (aten.cat.default, ([meta(2, 3), meta(2, 5)], -1), {}),
    (aten.cat.default, ([meta(2, 3), meta(2, 5), meta(2, 1)], -1), {}),
    (aten.constant_pad_nd.default, (meta(2, 3), [1, 1], 0.0), {}),
    (aten.mean.dim, (meta(2, 3, 4), [-1], True), {}),
    (aten.mean.dim, (meta(2, 3, 4), [-1], False), {}),
    (aten.div.Tensor, (meta(2, dtype=torch.int64), meta(2, dtype=torch.int64)), {}),
]


def test_a_repeated_call_has_the_layout_of_its_kernel() -> None:
    kernels = MetaKernels()
    for _ in range(2):
        for func, args, kwargs in CALLS:
            out, real = kernels.run(func, args, kwargs), func(*args, **kwargs)
            assert (out.shape, out.stride(), out.dtype, out.device) == (
                real.shape,
                real.stride(),
                real.dtype,
                real.device,
            )


def test_a_repeated_call_runs_no_kernel_and_gives_new_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels, runs = MetaKernels(), []
    call = torch._ops.OpOverload.__call__

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        runs.append(str(self))
        return call(self, *args, **kwargs)

    monkeypatch.setattr(torch._ops.OpOverload, "__call__", counted)
    results = [kernels.run(aten.mm.default, (meta(3, 4), meta(4, 5)), {}) for _ in range(3)]
    assert runs.count("aten.mm.default") == 1
    assert len({out.untyped_storage()._cdata for out in results}) == 3


def test_the_default_dtype_is_part_of_a_call() -> None:
    kernels, counts = MetaKernels(), meta(2, dtype=torch.int64)
    before = torch.get_default_dtype()
    assert kernels.run(aten.div.Tensor, (counts, counts), {}).dtype is torch.float32
    try:
        torch.set_default_dtype(torch.float64)
        assert kernels.run(aten.div.Tensor, (counts, counts), {}).dtype is torch.float64
    finally:
        torch.set_default_dtype(before)


def test_views_stay_views_even_where_the_schema_says_nothing() -> None:
    kernels, base = MetaKernels(), meta(2, 6)
    for _ in range(2):
        for func, args in ((aten._unsafe_view.default, (base, [3, 4])), (aten.transpose.int, (base, 0, 1))):
            assert kernels.run(func, args, {}).untyped_storage()._cdata == base.untyped_storage()._cdata


def test_a_write_gives_back_what_it_wrote_to() -> None:
    kernels, base = MetaKernels(), meta(2, 6)
    for _ in range(2):
        assert kernels.run(aten.add_.Tensor, (base, 1), {}) is base


def test_real_tensors_keep_their_values() -> None:
    kernels = MetaKernels()
    for number in (1.0, 2.0):
        assert kernels.run(aten.mul.Tensor, (torch.full((2,), number), 3), {}).tolist() == [3 * number] * 2


@pytest.mark.parametrize("phase", ["prefill", "decode", "train"])
@pytest.mark.parametrize("model_type", ["gpt_oss", "gemma2", "jamba", "deepseek_v3"])
def test_a_record_is_the_same_without_remembering(model_type: str, phase: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_on_meta(*architecture(model_type))
    run = RunShape(phase="decode", seq=1, context=16) if phase == "decode" else RunShape(phase=phase, seq=16)
    remembered = observe(model, IDENTITY, run)
    monkeypatch.setattr(MetaKernels, "run", lambda self, func, args, kwargs: func(*args, **kwargs))
    assert observe(model, IDENTITY, run) == remembered
