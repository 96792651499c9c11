"""Number formats bit by bit, and what their rounding does: seeded experiments beside theory, noise of one GEMM.

Without options: the formats and every experiment. `measured` is the root mean square over independent trials and
`largest` the largest of them; `expected` is what theory predicts for this data, `bound` what no correct computation
passes (`holds`; a violation is exit code 1). `--gemm M,K,N --dtype D` answers how far two correct kernels of that
product may lie apart, so that noise can be told from a bug: differences are in units of the root mean square of the
product, `gemm_noise_limit` is where noise ends, and kernels with a planted bug show what lies beyond. All formulas and
sources are in docs/numerics.md. The 14-bit tensor-core accumulation is imitated from a description, not measured.
"""

from __future__ import annotations

import math

from introspect.analyzers._gemm_noise import GemmTheory
from introspect.analyzers._numerics_figure import ABOUT, CAPTION, panels_of
from introspect.analyzers._numerics_theory import Theory
from introspect.figures import Figure
from introspect.numerics_record import (
    GRADIENT_LOG2_DEVIATION,
    GRADIENT_LOG2_MEAN,
    OUTLIER_FACTOR,
    OUTLIER_FEATURES,
    QUANTISED_SHAPE,
    TENSOR_CORE_BITS,
    TENSOR_CORE_GROUP,
    Measurement,
    NumberFormat,
    NumericsParams,
    NumericsRecord,
)
from introspect.table import Result, Table, Value

MODELS = "none"
GATHER = "numerics"
EXAMPLES = (
    "introspect numerics",
    "introspect numerics --experiment sum_error --plot sums.svg",
    "introspect numerics --gemm 4096,14336,4096 --dtype bf16",
)

Params = NumericsParams

FORMAT_UNITS = {
    "format": "",
    "bits": "bit",
    "exponent_bits": "bit",
    "mantissa_bits": "bit",
    "min": "",
    "max": "",
    "min_normal": "",
    "min_subnormal": "",
    "epsilon": "",
    "unit_roundoff": "",
    "has_inf": "",
    "has_nan": "",
    "defined_by": "",
}

EXPERIMENT_UNITS = {
    "experiment": "",
    "format": "",
    "method": "",
    "at": "as in quantities",
    "measured": "as in quantities",
    "largest": "as in quantities",
    "expected": "as in quantities",
    "bound": "as in quantities",
    "holds": "",
}

_SLACK = 1 + 1e-6  # the measurement itself is done in fp32 and fp64


def analyze(params: NumericsParams, record: NumericsRecord) -> Result:
    """Tables `formats`, `experiments` with `quantities` (what each one measures), and `gemm` where one is asked for."""
    theory = Theory(record)
    lines = tuple(theory.line(point) for point in record.measurements)
    rows = tuple(_experiment_row(point, *line) for point, line in zip(record.measurements, lines, strict=True))
    tables = {"formats": Table(units=FORMAT_UNITS, rows=tuple(map(_format_row, record.formats)))}
    if rows:
        tables["experiments"] = Table(units=EXPERIMENT_UNITS, rows=rows)
        tables["quantities"] = _quantities(record)
    totals: dict[str, Value] = {
        "fp16_exp_overflow_at": math.log(record.format("fp16").max),
        "bf16_largest_swallowed_update": theory.roundoff("bf16"),
    }
    notes: list[str] = []
    panels = panels_of(record.measurements, lines)
    findings = any(row["holds"] is False for row in rows)
    if record.gemm:
        noise = GemmTheory(record.gemm, theory.roundoff(record.gemm.output_dtype))
        tables["gemm"] = noise.table()
        totals |= noise.totals()
        notes += noise.advice()
        findings |= noise.contradicted()
        panels += (noise.panel(),)
    return Result(
        command="numerics",
        totals=totals,
        tables=tables,
        assumptions=_assumptions(record),
        notes=(*notes, f"measured with torch {record.versions['torch']}, seed {params.seed}"),
        findings=findings,
        figure=Figure(panels=panels, caption=CAPTION),
    )


def _format_row(entry: NumberFormat) -> dict[str, Value]:
    return {
        "format": entry.name,
        "bits": entry.bits,
        "exponent_bits": entry.exponent_bits,
        "mantissa_bits": entry.mantissa_bits,
        "min": entry.min,
        "max": entry.max,
        "min_normal": entry.min_normal,
        "min_subnormal": entry.min_subnormal,
        "epsilon": entry.epsilon,
        "unit_roundoff": entry.unit_roundoff,
        "has_inf": entry.has_inf,
        "has_nan": entry.has_nan,
        "defined_by": entry.defined_by,
    }


def _experiment_row(point: Measurement, expected: float | None, bound: float | None) -> dict[str, Value]:
    holds = point.worst <= bound * _SLACK if bound is not None and point.worst is not None else None
    return {
        "experiment": point.experiment,
        "format": point.format,
        "method": point.method,
        "at": point.at,
        "measured": point.measured,
        "largest": point.worst,
        "expected": expected,
        "bound": bound,
        "holds": holds,
    }


def _quantities(record: NumericsRecord) -> Table:
    """What the numbers of each experiment that ran are."""
    ran = {point.experiment for point in record.measurements}
    rows: tuple[dict[str, Value], ...] = tuple(
        {"experiment": name, "what": about.title, "at": about.at, "measured": about.quantity}
        for name, about in ABOUT.items()
        if name in ran
    )
    return Table(units={"experiment": "", "what": "", "at": "", "measured": ""}, rows=rows)


def _assumptions(record: NumericsRecord) -> tuple[str, ...]:
    """What the data and the imitated hardware of the experiments that ran rest on."""
    ran = {point.experiment for point in record.measurements}
    tokens, features = QUANTISED_SHAPE
    tensor_core = (
        f"tensor core: {TENSOR_CORE_GROUP} products aligned and cut to {TENSOR_CORE_BITS} bits, as DeepSeek-V3's "
        "report describes Hopper's FP8 accumulation; imitated, not measured on a GPU"
    )
    about = {
        "sum_error": tensor_core,
        "gemm_error": tensor_core,
        "loss_scale": f"gradients: log2 of the magnitude is normal, mean {GRADIENT_LOG2_MEAN:g}, "
        f"standard deviation {GRADIENT_LOG2_DEVIATION:g}",
        "quantisation": f"activations: {tokens} x {features} standard normal, {OUTLIER_FEATURES} features "
        f"{OUTLIER_FACTOR:g} times larger",
    }
    assumed = [text for name, text in about.items() if name in ran]
    if record.gemm:
        assumed.append(
            "gemm: fp32 additions round to nearest; a tensor core that cuts instead doubles the fp32 parts of bound "
            "and tolerance"
        )
    return tuple(dict.fromkeys(assumed))
