"""How far two correct kernels of one product may lie apart: worst case, typical size, and where noise ends.

Two kernels that add k products in fp32, in any order, are each within k * 2^-24 * |A||B| of the exact product
(Jeannerod and Rump 2013). Typically each is off by RMS_ROUNDING * 2^-24 * sqrt(k/2) of the product's root mean square,
and their difference d by sqrt(2) times that. A narrower output hides d unless a rounding boundary lies between the
two: with probability |d| / ulp they then differ by one ulp, so the mean square is E|d| * ulp with E|d| = sqrt(2/pi) d.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from introspect.analyzers._rounding import FP32_ROUNDOFF, dot_bound, typical_dot
from introspect.figures import Panel, Series
from introspect.numerics_record import TRIALS, GemmNoise, KernelDifference
from introspect.table import Table, Value

UNITS = {
    "kernel": "",
    "correct": "",
    "rms_difference": "rms of the product",
    "largest_difference": "rms of the product",
    "largest_over_bound": "",
    "changed_share": "share",
    "verdict": "",
}

_LIMIT_FACTOR = 4  # noise ends at this many times its typical size


@dataclass(frozen=True, slots=True)
class GemmTheory:
    """The lines beside one measured product. `output_roundoff`: unit roundoff of the format it is stored in."""

    noise: GemmNoise
    output_roundoff: float

    @property
    def rounds_output(self) -> bool:
        """Whether the fp32 sum is rounded once more."""
        return self.noise.output_dtype != "fp32"

    @property
    def sum_difference(self) -> float:
        """Typical difference of the fp32 sums, over the rms of the product."""
        return math.sqrt(2) * typical_dot(self.noise.k, FP32_ROUNDOFF, rounded_products=False)

    @property
    def expected(self) -> float:
        """Root mean square of the difference of two outputs, over the rms of the product."""
        if not self.rounds_output:
            return self.sum_difference
        return math.sqrt(math.sqrt(2 / math.pi) * self.sum_difference * self.noise.mean_ulp)

    @property
    def limit(self) -> float:
        """Where noise ends: some times the expected difference, and never less than one flip among the outputs."""
        return _LIMIT_FACTOR * math.hypot(self.expected, self.noise.mean_ulp / TRIALS)

    @property
    def bound(self) -> float:
        """Largest difference at an output of average size, over the rms of the product."""
        rounding = 2 * self.output_roundoff if self.rounds_output else 0.0
        return 2 * dot_bound(self.noise.k, FP32_ROUNDOFF) * self.noise.condition + rounding

    def verdict(self, kernel: KernelDifference) -> str:
        """ "bug" when rounding does not explain the difference."""
        return "bug" if kernel.worst_over_bound > 1 or kernel.rms_difference > self.limit else "noise"

    def contradicted(self) -> bool:
        """Whether a correct kernel looks like a bug: then the theory, or torch's kernel, is wrong."""
        return any(kernel.correct and self.verdict(kernel) == "bug" for kernel in self.noise.kernels)

    def table(self) -> Table:
        """One row a kernel, against the one that adds in order."""
        rows: tuple[dict[str, Value], ...] = tuple(
            {
                "kernel": kernel.kernel,
                "correct": kernel.correct,
                "rms_difference": kernel.rms_difference,
                "largest_difference": kernel.worst_difference,
                "largest_over_bound": kernel.worst_over_bound,
                "changed_share": kernel.share_changed,
                "verdict": self.verdict(kernel),
            }
            for kernel in self.noise.kernels
        )
        return Table(units=UNITS, rows=rows)

    def panel(self) -> Panel:
        """The kernels' differences, and where noise ends."""
        places = range(len(self.noise.kernels))
        marks = ((place, kernel.rms_difference) for place, kernel in enumerate(self.noise.kernels))
        shape = f"{self.noise.m} x {self.noise.k} x {self.noise.n}"
        return Panel(
            title=f"{shape} {self.noise.dtype} against the kernel that adds in order (no mark: identical)",
            x_label="",
            y_label="rms difference / rms of the product",
            series=(
                Series(label="measured", color=0, style="points", xy=tuple(mark for mark in marks if mark[1] > 0)),
                Series(label="expected of noise", color=2, xy=tuple((place, self.expected) for place in places)),
                Series(label="noise ends", color=1, style="dashed", xy=tuple((place, self.limit) for place in places)),
            ),
            log_y=True,
            ticks=tuple(kernel.kernel for kernel in self.noise.kernels),
        )

    def totals(self) -> dict[str, Value]:
        """Differences over the rms of the product, shares, and tolerances for a test of one's own."""
        correct = [kernel for kernel in self.noise.kernels if kernel.correct]
        return {
            "gemm_measured_difference": max(kernel.rms_difference for kernel in correct),
            "gemm_expected_difference": self.expected,
            "gemm_noise_limit": self.limit,
            "gemm_bound": self.bound,
            "gemm_relative_tolerance": self.relative_tolerance,
            "gemm_absolute_tolerance": self.absolute_tolerance,
        }

    @property
    def relative_tolerance(self) -> float:
        """One unit in the last place of a rounded output."""
        return 2 * self.output_roundoff if self.rounds_output else 0.0

    @property
    def absolute_tolerance(self) -> float:
        """Twice the largest of m n typical sum differences, over the rms of the product."""
        return 2 * self.sum_difference * math.sqrt(2 * math.log(max(self.noise.m * self.noise.n, 2)))

    def advice(self) -> tuple[str, ...]:
        """How to use the figures on matrices of one's own."""
        noise = self.noise
        rounding = f" + {2 * self.output_roundoff:.3g} |C|" if self.rounds_output else ""
        return (
            f"gemm {noise.m} x {noise.k} x {noise.n}, {noise.dtype} operands, fp32 sums, {noise.output_dtype} result: "
            f"differences are over the root mean square of the product, measured on {TRIALS} x {TRIALS} outputs",
            f"at any output a difference above {2 * dot_bound(noise.k, FP32_ROUNDOFF):.3g} (|A||B|){rounding} is a bug",
            f"a test: torch.testing.assert_close(rtol={self.relative_tolerance:.3g}, "
            f"atol={self.absolute_tolerance:.3g} * C.float().square().mean().sqrt())",
        )
