"""What `numerics` is asked and what hooks/numerics.py measured, as frozen values. Readable without torch.

The set-up constants are shared by the measurement (hooks) and by the theory beside it (analyzers), so the line and the
points can never describe different data.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from introspect.errors import OptionError
from introspect.params import PlotParams, option

EXPERIMENTS = (
    "swallowed_update",
    "update_drift",
    "exp_overflow",
    "softmax_sum",
    "sum_error",
    "gemm_error",
    "loss_scale",
    "variance",
    "quantisation",
)

TERMS = (64, 256, 1024, 4096, 16384)
"""Numbers of terms k at which sums and products are looked at."""

TRIALS = 64
"""Independent sums of each length; also the rows and the columns of the measured products."""

WEIGHT_UPDATE = 2.0**-10
"""lr * gradient of one step of the drift experiment, on weights that start at 1.0. bf16 swallows up to 2^-8 there."""

UPDATE_STEPS = (256, 1024, 4096)
"""Steps at which the drift is read."""

SOFTMAX_LOGITS = (0.0, 2.0, 4.125, 4.25, 6.0, 8.0, 10.0, 11.0, 12.0)
"""Logit values x of a softmax over SOFTMAX_WIDTH equal logits."""

SOFTMAX_WIDTH = 1024

GRADIENT_LOG2_MEAN = -22.0
GRADIENT_LOG2_DEVIATION = 5.0
"""log2 of a gradient's magnitude is normal with this mean and deviation: an assumption, a model of real gradients."""

LOSS_SCALES_LOG2 = (0, 4, 8, 12, 16, 20, 24, 28, 32)

VARIANCE_RATIOS = (1.0, 10.0, 100.0, 1000.0, 10000.0)
"""mean / standard deviation of the data whose variance is taken."""

VARIANCE_WIDTH = 1024

TENSOR_CORE_BITS = 14
TENSOR_CORE_GROUP = 32
PROMOTION_INTERVAL = 128
"""Hopper's FP8 accumulation as DeepSeek-V3's report (arXiv 2412.19437, 3.3.2 and 3.5.2) describes it: 32 products are
aligned to the largest exponent and cut to 14 bits; their remedy adds the partial sum into fp32 every 128 products."""

TENSOR_CORE_METHODS = {"14 bits": False, "14 bits, promoted": True}
"""Names of the two ways to accumulate, and whether each promotes."""

OUTLIER_FEATURES = 4
OUTLIER_FACTOR = 20.0
QUANTISED_SHAPE = (256, 1024)
"""Activations [tokens, features], standard normal, of which a few features are larger by a factor (LLM.int8(), arXiv
2208.07339, reports outlier features up to 20 times the rest)."""


GEMM_OUTPUT = {"bf16": "bf16", "fp16": "fp16", "tf32": "fp32", "fp32": "fp32", "fp8_e4m3fn": "bf16", "fp8_e5m2": "bf16"}
"""Formats `--gemm` takes, with the format its result is stored in."""

GEMM_TILE = 16
"""Terms of k that one matrix instruction adds."""


GEMM_LARGEST_K = 2**18
"""Every term of k is one step of the measurement: this many take about ten seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NumericsParams(PlotParams):
    """What to measure. Without options: every experiment, and no product."""

    experiment: tuple[str, ...] = option((), "only this experiment, repeatable (default: all)", choices=EXPERIMENTS)
    gemm: str | None = option(None, "noise between correct kernels of one product, instead", metavar="M,K,N")
    dtype: str | None = option(None, "operands of --gemm (default: bf16)", choices=tuple(GEMM_OUTPUT))
    seed: int = option(0, "seed of all random numbers", at_least=0)

    def __post_init__(self) -> None:
        """Refuse a --gemm that is no product, and a --dtype of none, before anything is measured."""
        if self.gemm_shape is None and self.dtype is not None:
            raise OptionError("--dtype", self.dtype, "--gemm M,K,N beside it: it names the operands of that product")

    @property
    def gemm_dtype(self) -> str:
        """The operands' format."""
        return self.dtype or "bf16"

    @property
    def gemm_shape(self) -> tuple[int, int, int] | None:
        """(m, k, n) of --gemm. OptionError when it is no such triple."""
        if self.gemm is None:
            return None
        sizes = [int(part) for part in self.gemm.split(",") if part.strip().isdecimal()]
        if len(sizes) != 3 or self.gemm.count(",") != 2 or min(sizes) < 1 or sizes[1] > GEMM_LARGEST_K:
            raise OptionError("--gemm", self.gemm, f"M,K,N: three integers from 1, K up to {GEMM_LARGEST_K}")
        return sizes[0], sizes[1], sizes[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class NumberFormat:
    """One number format as read off its bit patterns. None where a property has no meaning for it.

    `magnitudes`: every finite non-negative value in ascending order, for formats of up to 8 bits with a zero, else ().
    `defined_by`: what turned the bits into values.
    """

    name: str
    bits: int
    exponent_bits: int | None
    mantissa_bits: int | None
    min: float
    max: float
    min_normal: float | None
    min_subnormal: float | None
    epsilon: float | None
    has_inf: bool
    has_nan: bool
    magnitudes: tuple[float, ...]
    defined_by: str

    @property
    def unit_roundoff(self) -> float | None:
        """Largest relative error of one rounding to nearest, half of epsilon."""
        return None if self.epsilon is None else self.epsilon / 2

    @property
    def overflow_threshold(self) -> float:
        """The smallest magnitude that rounds away from `max`: half a unit in the last place above it."""
        step = 1.0 if self.epsilon is None else self.epsilon * 2.0 ** (math.frexp(self.max)[1] - 1)
        return self.max + step / 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One measured point. `measured` is the root mean square over the trials and `worst` the largest of them (equal
    where there is one trial); None when the result was not a number.

    `condition`: sum of |terms| over the size of the result they are compared with, the factor by which cancellation
    magnifies a rounding error. `scales`: quantisation scales that the elements met, as equally likely quantiles, and
    `largest_scale` among them.
    """

    experiment: str
    format: str
    method: str
    at: float | None
    measured: float | None
    worst: float | None
    condition: float = 1.0
    scales: tuple[float, ...] = ()
    largest_scale: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelDifference:
    """One kernel's product against the in-order kernel's, over the sampled outputs.

    Differences are in units of the root mean square of the product. `worst_over_bound`: the largest ratio of a
    difference to the bound two correct kernels obey at that output. `correct`: False for a planted bug.
    """

    kernel: str
    correct: bool
    rms_difference: float
    worst_difference: float
    worst_over_bound: float
    share_changed: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmNoise:
    """What `--gemm` measured on TRIALS x TRIALS outputs: the kernels, and two averages that the theory needs.

    `mean_ulp`: mean unit in the last place of an output, and `condition`: mean of |A||B|, both over the root mean
    square of the product.
    """

    m: int
    k: int
    n: int
    dtype: str
    output_dtype: str
    mean_ulp: float
    condition: float
    kernels: tuple[KernelDifference, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class NumericsRecord:
    """Everything one run of `numerics` measured."""

    formats: tuple[NumberFormat, ...]
    measurements: tuple[Measurement, ...]
    gemm: GemmNoise | None
    versions: dict[str, str]

    def format(self, name: str) -> NumberFormat:
        """The format of this name."""
        return next(entry for entry in self.formats if entry.name == name)
