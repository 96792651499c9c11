"""What the command `numerics` needs measured: the formats, the experiments asked for, and one product's noise."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from introspect.hooks.gemm_noise import measure_gemm
from introspect.hooks.number_formats import number_formats
from introspect.hooks.numerics_experiments import measure
from introspect.numerics_record import EXPERIMENTS, NumericsParams, NumericsRecord
from introspect.progress import progress


@contextmanager
def _one_thread() -> Iterator[None]:
    """torch on one thread, so that no sum depends on the number of cores; these small tensors are faster for it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def gather(params: NumericsParams) -> NumericsRecord:
    """Measure. With a product asked for, the experiments run only when they are asked for too."""
    shape = params.gemm_shape
    wanted = params.experiment or (() if shape else EXPERIMENTS)
    with progress("measuring"), _one_thread():
        return NumericsRecord(
            formats=number_formats(),
            measurements=tuple(point for name in wanted for point in measure(name, params.seed)),
            gemm=measure_gemm(*shape, params.gemm_dtype, params.seed) if shape else None,
            versions={"torch": torch.__version__},
        )
