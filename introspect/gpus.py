"""Accelerator data: memory, bandwidth and dense peak rates, each row with its source.

Built-in rows live in data/gpus.json; a user's file (`user_gpu_file`) and `--gpu-file` add more under the same checks.
Figures are the vendor's: decimal bytes, bytes a second in one direction, dense operations a second (a multiply and an
add are two). A rate the sheet does not give is None and stays unknown.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import date
from difflib import get_close_matches
from importlib.resources import files
from pathlib import Path
from typing import Any

from introspect.errors import GpuFileError, UnknownGpuError
from introspect.strict_json import JsonProblem, parse_object

PEAK_DTYPES = ("fp32", "tf32", "fp16", "bf16", "fp8", "int8", "fp4")
"""Dtypes a row may give a dense peak for."""

BOUNDS = {
    "memory_bytes": (1e9, 1e13),
    "bandwidth_bytes_per_second": (1e9, 1e15),
    "interconnect_bytes_per_second": (1e9, 1e14),
    "dense_peak_per_second": (1e9, 1e18),
}
"""Smallest and largest plausible figure: a slip of a unit (GB for bytes, TFLOPS for FLOPS) falls outside."""

FIELDS = {
    "aliases",
    "memory_bytes",
    "bandwidth_bytes_per_second",
    "dense_peak_per_second",
    "interconnect",
    "interconnect_bytes_per_second",
    "note",
    "source_url",
    "retrieved",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One accelerator. `peaks` maps a dtype of PEAK_DTYPES to dense operations a second; absent means unknown."""

    name: str
    aliases: tuple[str, ...]
    memory_bytes: int
    bandwidth_bytes_per_second: int
    peaks: dict[str, int]
    interconnect: str
    interconnect_bytes_per_second: int | None
    note: str
    source_url: str
    retrieved: str

    def peak(self, dtype: str) -> int | None:
        """Dense operations a second for a product of two operands of this dtype (a name of units.DTYPE_BITS)."""
        family = next((name for name in PEAK_DTYPES if dtype.startswith(name)), None)
        return None if family is None else self.peaks.get(family)

    def ridge(self, dtype: str) -> float | None:
        """FLOPs per byte above which a product of this dtype is bound by compute; None when the peak is unknown."""
        peak = self.peak(dtype)
        return None if peak is None else peak / self.bandwidth_bytes_per_second


def load_gpus(gpu_file: str | None = None) -> dict[str, Gpu]:
    """All rows by name: built in, then the user's file if there is one, then `gpu_file`.

    Raises GpuFileError for an unreadable file, a damaged row, or a name or alias that is already taken.
    """
    gpus: dict[str, Gpu] = {}
    _add(gpus, files("introspect").joinpath("data/gpus.json").read_bytes(), "built-in gpus.json")
    if user_gpu_file().is_file():
        _add(gpus, _read(user_gpu_file()), str(user_gpu_file()))
    if gpu_file is not None:
        _add(gpus, _read(Path(gpu_file)), gpu_file)
    return gpus


def find_gpus(names: tuple[str, ...], gpu_file: str | None = None) -> tuple[Gpu, ...]:
    """The rows of these names or aliases, in order. Raises UnknownGpuError with the nearest names."""
    gpus = load_gpus(gpu_file)
    by_alias = {alias: gpu for gpu in gpus.values() for alias in (gpu.name, *gpu.aliases)}
    for name in names:
        if name.lower() not in by_alias:
            raise UnknownGpuError(name, tuple(get_close_matches(name.lower(), by_alias, n=5, cutoff=0.4)))
    return tuple(by_alias[name.lower()] for name in names)


def user_gpu_file() -> Path:
    """Where a user keeps own rows: `introspect/gpus.json` under XDG_CONFIG_HOME, else under ~/.config."""
    config = os.environ.get("XDG_CONFIG_HOME")
    return (Path(config) if config else Path.home() / ".config") / "introspect" / "gpus.json"


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise GpuFileError(str(path), "file", f"cannot be read: {error}") from error


def _add(gpus: dict[str, Gpu], data: bytes, source: str) -> None:
    try:
        rows = parse_object(data).get("gpus")
    except JsonProblem as problem:
        raise GpuFileError(source, "file", str(problem)) from problem
    if not isinstance(rows, dict):
        raise GpuFileError(source, "gpus", 'expected {"gpus": {"name": {...}, ...}}')
    for name, fields in rows.items():
        gpu = _gpu(name, fields, source)
        taken = {alias for other in gpus.values() for alias in (other.name, *other.aliases)}
        for alias in (gpu.name, *gpu.aliases):
            if alias in taken:
                raise GpuFileError(source, name, f"the name {alias!r} is taken already; choose another")
        gpus[name] = gpu


@dataclass(frozen=True, slots=True)
class _Row:
    """One entry of a file as read, and the checks that turn its fields into values."""

    source: str
    name: str
    fields: dict[str, Any]

    def wrong(self, field: str, problem: str) -> GpuFileError:
        return GpuFileError(self.source, f"{self.name}: {field}", problem)

    def text(self, field: str) -> str:
        value = self.fields.get(field, "")
        if not isinstance(value, str):
            raise self.wrong(field, f"got {value!r}, expected text")
        return value

    def figure(self, field: str, value: Any) -> int:
        low, high = BOUNDS[field]
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise self.wrong(field, f"got {value!r}, expected a number from {low:.0e} to {high:.0e}")
        return round(value)

    def aliases(self) -> tuple[str, ...]:
        value = self.fields.get("aliases", [])
        if not isinstance(value, list) or not all(isinstance(alias, str) and alias == alias.lower() for alias in value):
            raise self.wrong("aliases", f"got {value!r}, expected a list of lower-case names")
        return tuple(value)

    def peaks(self) -> dict[str, int]:
        value = self.fields.get("dense_peak_per_second")
        if not isinstance(value, dict) or not value or not set(value) <= set(PEAK_DTYPES):
            raise self.wrong("dense_peak_per_second", f"got {value!r}, expected some of {', '.join(PEAK_DTYPES)}")
        return {dtype: self.figure("dense_peak_per_second", peak) for dtype, peak in value.items()}

    def source_url(self) -> str:
        value = self.text("source_url")
        if not value.startswith("https://"):
            raise self.wrong("source_url", f"got {value!r}, expected the https address of the data sheet")
        return value

    def retrieved(self) -> str:
        value = self.text("retrieved")
        try:
            date.fromisoformat(value)
        except ValueError as error:
            raise self.wrong("retrieved", f"got {value!r}, expected a date as 2026-01-31") from error
        return value


def _gpu(name: str, fields: Any, source: str) -> Gpu:
    row = _Row(source, name, fields)
    if not isinstance(fields, dict):
        raise row.wrong("row", f"got {fields!r}, expected an object")
    if unknown := sorted(set(fields) - FIELDS):
        raise row.wrong(unknown[0], f"unknown field, expected one of {', '.join(sorted(FIELDS))}")
    if name != name.lower() or not name.strip():
        raise row.wrong("name", "expected a lower-case name")
    link = fields.get("interconnect_bytes_per_second")
    return Gpu(
        name=name,
        aliases=row.aliases(),
        memory_bytes=row.figure("memory_bytes", fields.get("memory_bytes")),
        bandwidth_bytes_per_second=row.figure("bandwidth_bytes_per_second", fields.get("bandwidth_bytes_per_second")),
        peaks=row.peaks(),
        interconnect=row.text("interconnect"),
        interconnect_bytes_per_second=None if link is None else row.figure("interconnect_bytes_per_second", link),
        note=row.text("note"),
        source_url=row.source_url(),
        retrieved=row.retrieved(),
    )
