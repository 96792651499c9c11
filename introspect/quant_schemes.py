"""Which format a checkpoint's own quantisation gives to which module, read from its settings.

Settings are the `quantization_config` of a config file and the `hf_quant_config.json` that ModelOpt writes beside it.
Patterns mean what each library takes them for: transformers' lists match from the start of a name, as a regular
expression or as its end; compressed-tensors' targets are class names, exact names or `re:` expressions; ModelOpt's are
shell patterns of a module or of what it lies in. A module may be known under several names: any of them counts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import translate
from itertools import accumulate
from typing import Any

from introspect.formats import Format, format_of, load_formats

Names = tuple[str, ...]
Choose = Callable[[Names], Format | None]
Settings = Mapping[str, Any]


class UnknownScheme(ValueError):
    """Settings that name no layout known here: says which."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schemes:
    """How a checkpoint is quantised. `choose` gives the format of a Linear's weight by its names; None keeps it.

    `formats`: every format it may give, with what asks for it. `only_in_layers`: matrices outside layers are kept.
    `only_experts`: all but stacked experts are kept.
    """

    method: str
    choose: Choose
    formats: dict[str, Format]
    only_in_layers: bool = False
    only_experts: bool = False
    kv_dtype: str | None = None


def schemes(settings: Settings | None, side_file: Settings | None, skips: Iterable[str], dtype: str) -> Schemes:
    """Read the settings of one checkpoint.

    Args:
        settings: its quantization_config; None without one.
        side_file: its hf_quant_config.json; None without one.
        skips: names that transformers never quantises in this model (the head, what is tied).
        dtype: the model's own, which compressed-tensors' scales take.

    Raises:
        UnknownScheme: for a method or layout not known here, and for settings that make no sense.
    """
    try:
        return _read(settings, side_file, tuple(skips), dtype)
    except UnknownScheme:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, re.error) as error:
        raise UnknownScheme(f"its settings cannot be read ({type(error).__name__}: {error})") from error


def _read(settings: Settings | None, side_file: Settings | None, skips: Names, dtype: str) -> Schemes:
    beside = None
    if side_file is not None and isinstance(side_file.get("quantization"), dict):
        beside = _modelopt(side_file["quantization"])
    method = method_of(settings or {})
    if settings is None or (beside is not None and method == "modelopt"):
        return beside or _unknown(method)
    if method == "modelopt":
        own = _modelopt(settings)
    elif method == "compressed-tensors":
        own = _compressed_tensors(settings, dtype)
    elif method in _TRANSFORMERS:
        own = _TRANSFORMERS[method](settings, skips)
    else:
        own = _unknown(method)
    return own if beside is None else _both(beside, own)


def _unknown(method: str) -> Schemes:
    raise UnknownScheme(f"quant_method {method!r} has no layout known here")


def _both(first: Schemes, second: Schemes) -> Schemes:
    """The side file requantised some modules of a checkpoint that its config says to be quantised otherwise."""
    return Schemes(
        method=f"{first.method} over {second.method}",
        choose=lambda names: first.choose(names) or second.choose(names),
        formats=second.formats | first.formats,
        kv_dtype=first.kv_dtype or second.kv_dtype,
    )


def method_of(settings: Settings) -> str:
    """The method's name; bitsandbytes' old configs name none."""
    if settings.get("load_in_4bit") or settings.get("load_in_8bit"):
        return "bitsandbytes"
    return str(settings.get("quant_method") or "unnamed")


# --- transformers' own methods ------------------------------------------------------------------------------------


def _all_but(
    method: str,
    format: Format,
    patterns: Iterable[str],
    *,
    only_in_layers: bool = False,
    only_experts: bool = False,
) -> Schemes:
    """One format for every Linear that no pattern names."""
    is_skipped = skip_rule(patterns)
    return Schemes(
        method=method,
        choose=lambda names: None if any(map(is_skipped, names)) else format,
        formats={method: format},
        only_in_layers=only_in_layers,
        only_experts=only_experts,
    )


def skip_rule(patterns: Iterable[str]) -> Callable[[str], bool]:
    """transformers' rule of modules_to_not_convert: start of the name or regex up to a module's end, or its end."""
    found = tuple(dict.fromkeys(patterns))
    if not found:
        return lambda name: False
    start = re.compile(f"(?:{'|'.join(f'(?:{pattern})' for pattern in found)})(?:(?<=\\.)|(?=\\.|$))")
    return lambda name: start.match(name) is not None or name.endswith(found)


def _listed(settings: Settings, key: str, skips: Names, *, always: bool = False) -> Names:
    """The config's list; the default skips where it gives none (or always, where the quantiser adds them)."""
    listed = settings.get(key)
    return (*(skips if always or listed is None else ()), *(listed or ()))


def _fp8(settings: Settings, skips: Names) -> Schemes:
    block = settings.get("weight_block_size")
    format = _variant("fp8-tensor" if block is None else "fp8-block128", {"scale_block": block or (0, 0)})
    return _all_but("fp8", format, _listed(settings, "modules_to_not_convert", skips, always=True))


def _fbgemm(settings: Settings, skips: Names) -> Schemes:
    patterns = _listed(settings, "modules_to_not_convert", skips, always=True)
    return _all_but("fbgemm_fp8", load_formats()["fp8-channel"], patterns)


def _grouped(settings: Settings) -> dict[str, Any]:
    group = int(settings.get("group_size", 128))
    return {"bits": int(settings.get("bits", 4)), "scale_block": (1, max(group, 0))}


def _gptq(settings: Settings, skips: Names) -> Schemes:
    format = _variant("gptq-int4-g128", _grouped(settings))
    patterns = _listed(settings, "modules_to_not_convert", skips, always=True)
    return _all_but("gptq", format, patterns, only_in_layers=True)


def _awq(settings: Settings, skips: Names) -> Schemes:
    format = _variant("awq-int4-g128", _grouped(settings))
    return _all_but("awq", format, _listed(settings, "modules_to_not_convert", skips, always=True))


def _bitsandbytes(settings: Settings, skips: Names) -> Schemes:
    if settings.get("load_in_4bit"):
        format = load_formats()["nf4-dq" if settings.get("bnb_4bit_use_double_quant") else "nf4"]
    else:
        format = _variant("int8-channel", {"extra": {"uint8": 1}})  # weight_format, one byte for each matrix
    return _all_but("bitsandbytes", format, _listed(settings, "llm_int8_skip_modules", skips))


def _mxfp4(settings: Settings, skips: Names) -> Schemes:
    format = _variant("mxfp4", {"scale": "uint8"})
    patterns = _listed(settings, "modules_to_not_convert", skips)
    return _all_but("mxfp4", format, patterns, only_experts=True)


_TRANSFORMERS: dict[str, Callable[[Settings, Names], Schemes]] = {
    "fp8": _fp8,
    "fbgemm_fp8": _fbgemm,
    "gptq": _gptq,
    "awq": _awq,
    "bitsandbytes": _bitsandbytes,
    "mxfp4": _mxfp4,
}


def _variant(name: str, changes: Mapping[str, Any]) -> Format:
    """A built-in format with some fields changed."""
    built_in = load_formats()[name]
    fields = {key: getattr(built_in, key) for key in Format.__slots__}
    return format_of({**fields, **changes})


# --- compressed-tensors -------------------------------------------------------------------------------------------


def _compressed_tensors(settings: Settings, dtype: str) -> Schemes:
    groups = [
        (tuple(group.get("targets") or ()), _packed(group, group.get("format") or settings.get("format"), dtype))
        for group in (settings.get("config_groups") or {}).values()
        if group.get("weights")
    ]
    if not groups:
        raise UnknownScheme("compressed-tensors settings without config_groups that quantise weights")
    ignore = tuple(settings.get("ignore") or ())

    def choose(names: Names) -> Format | None:
        if any(_is_target(name, ignore, class_name="") for name in names):
            return None
        return next((f for targets, f in groups if any(_is_target(name, targets, "Linear") for name in names)), None)

    return Schemes(
        method="compressed-tensors",
        choose=choose,
        formats={" ".join(targets): format for targets, format in groups},
        kv_dtype=_kv_dtype(settings.get("kv_cache_scheme")),
    )


def _is_target(name: str, targets: Iterable[str], class_name: str) -> bool:
    return any(
        re.match(target[3:], name) is not None if target.startswith("re:") else target in (name, class_name)
        for target in targets
    )


def _packed(group: Settings, layout: str | None, dtype: str) -> Format:
    """The tensors that compressed-tensors writes for one of its groups."""
    weights, inputs = group["weights"], group.get("input_activations")
    kind, bits = weights.get("type", "int"), int(weights.get("num_bits", 8))
    fields: dict[str, Any] = {"bits": bits, "scale": dtype, "scale_block": _block(weights)}
    if inputs is not None:
        fields["compute"] = {("int", 8): "int8", ("float", 8): "fp8", ("float", 4): "fp4"}.get((kind, bits))
    static = inputs is not None and not inputs.get("dynamic", False)
    if kind == "float" and bits == 8:
        fields |= {"element": "fp8_e4m3fn", "extra": {dtype: 1} if static else {}}
    elif kind == "float" and bits == 4 and str(layout).startswith("nvfp4"):
        fields |= {"scale": "fp8_e4m3fn", "extra": {"fp32": 1 if inputs is None else 2}}
    elif kind == "float" and bits == 4:
        fields |= {"scale": "uint8"}
    elif layout == "pack-quantized":
        fields |= {"word": "int32", "extra": {"int64": 2}, "zero": None if weights.get("symmetric", True) else "packed"}
        fields |= {"index": "int32"} if weights.get("actorder") in ("group", True) else {}
    elif bits == 8:
        fields |= {"element": "int8", "zero": None if weights.get("symmetric", True) else "int8"}
        fields |= {"extra": {dtype: 1} if static else {}}
    else:
        raise UnknownScheme(f"compressed-tensors layout {layout!r} of {bits}-bit {kind} has no size known here")
    return format_of({name: value for name, value in fields.items() if value is not None})


def _block(weights: Settings) -> tuple[int, int]:
    strategy = weights.get("strategy") or ("group" if weights.get("group_size") else "tensor")
    if strategy == "block":
        rows, columns = weights["block_structure"]
        return rows, columns
    if strategy in ("group", "tensor_group"):
        return 1, int(weights["group_size"])
    return (1, 0) if strategy == "channel" else (0, 0)


# --- ModelOpt -----------------------------------------------------------------------------------------------------

_MODELOPT: dict[str, Callable[[], Format]] = {
    "FP8": lambda: _variant("fp8-tensor", {"extra": {"fp32": 1}}),  # and the input's scale
    "NVFP4": lambda: load_formats()["nvfp4"],
    "W4A16_NVFP4": lambda: _variant("nvfp4", {"extra": {"fp32": 1}, "compute": None}),
}


def _modelopt(settings: Settings) -> Schemes:
    is_excluded = _shell_rule(settings.get("exclude_modules") or settings.get("ignore") or ())
    algorithm = str(settings.get("quant_algo"))
    layers: dict[str, Any] = settings.get("quantized_layers") or {}
    algorithms = {str(entry.get("quant_algo")) for entry in layers.values()}
    algorithms |= set() if algorithm == "MIXED_PRECISION" else {algorithm}
    formats = {name: _of_algorithm(name) for name in sorted(algorithms)}
    named = {path: formats[str(entry.get("quant_algo"))] for path, entry in layers.items()}
    everywhere = formats.get(algorithm)

    def choose(names: Names) -> Format | None:
        if any(map(is_excluded, names)):
            return None
        own = (named[parent] for name in names for parent in _parents(name) if parent in named)
        return next(own, everywhere)

    kv = settings.get("kv_cache_quant_algo")
    kv_dtype = str(kv).lower() if kv else _kv_dtype(settings.get("kv_cache_scheme"))
    return Schemes(method="modelopt", choose=choose, formats=formats, kv_dtype=kv_dtype)


def _of_algorithm(name: str) -> Format:
    if name not in _MODELOPT:
        raise UnknownScheme(f"ModelOpt's quant_algo {name!r} has no layout known here")
    return _MODELOPT[name]()


def _shell_rule(patterns: Iterable[str]) -> Callable[[str], bool]:
    """Whether a module or something it lies in fits a shell pattern."""
    found = tuple(patterns)
    if not found:
        return lambda name: False
    anyone = re.compile("|".join(translate(pattern) for pattern in found))
    return lambda name: any(anyone.match(parent) for parent in _parents(name))


def _parents(name: str) -> list[str]:
    """The name and all it lies in: a, a.b, a.b.c."""
    return list(accumulate(name.split("."), lambda path, part: f"{path}.{part}"))


def _kv_dtype(scheme: Settings | None) -> str | None:
    return "fp8" if scheme and scheme.get("type") == "float" and scheme.get("num_bits") == 8 else None
