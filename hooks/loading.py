"""What of a checkpoint would load into a model: built on meta, filled by transformers' own loader, then compared.

The loader says which parameters stay empty, have another shape or fail to assemble, in the model's names. Which stored
tensors that is, of which expert or which part of a fused matrix, follows from reverting the conversions it used.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_tie_weights

from introspect.check_record import ExpectedTensor, Failure, LoadRecord, Tie, WrongDtype, WrongShape
from introspect.checkpoint import Checkpoint
from introspect.hooks import loader
from introspect.hooks.build import BF16_ASSUMED, BuiltModel, build
from introspect.hooks.dtypes import dtype_name, torch_dtype
from introspect.hooks.loader import Landing, Loaded, State
from introspect.hooks.quantised import Quantisation, prepare
from introspect.packed import Packed, Part, find_packed, parts_of
from introspect.safetensors_header import SHORT_NAMES
from introspect.sources import Source
from introspect.units import tensor_bytes

DIMENSIONS = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")
Parts = dict[str, Part]


def compare(source: Source, checkpoint: Checkpoint) -> LoadRecord:
    """Load the headers of a checkpoint into the model of `source`. Raises what hooks.build raises."""
    with no_tie_weights():
        built = build(source)
    parts = parts_of(checkpoint)
    if not isinstance(built.module, PreTrainedModel):
        return _compare_plain(built, parts)
    model, dtype = built.module, torch_dtype(built.dtype)
    quantisation = prepare(model, source.config, dtype)
    if quantisation is not None and quantisation.quantiser is None:  # it may have replaced some modules
        with no_tie_weights():
            model = cast(PreTrainedModel, build(source).module)
    return _Comparison(built, model, dtype, quantisation, parts, names_only=checkpoint.kind == "index").record()


@dataclass(slots=True)
class _Comparison:
    """One load and what is concluded from it. `parts` are the stored tensors, `dense` those handed to the loader."""

    built: BuiltModel
    model: PreTrainedModel
    dtype: torch.dtype
    quantisation: Quantisation | None
    parts: Parts
    names_only: bool
    packed: dict[str, Packed] = field(default_factory=dict)
    unknown: set[str] = field(default_factory=set)

    def record(self) -> LoadRecord:
        """Run the load and compare."""
        quantiser = self.quantisation.quantiser if self.quantisation else None
        if self.quantisation and self.quantisation.known and quantiser is None:
            self.packed = {one.parameter: one for one in find_packed(self.parts, self.quantisation.bits)}
        inside = {name for one in self.packed.values() for name in one.parts}
        dense = {name: part for name, part in self.parts.items() if name not in inside}
        dense |= {one.parameter: Part(None, one.shape) for one in self.packed.values()}
        mapping = loader.conversions(self.model, quantiser)
        tensors = self._tensors(dense, mapping)
        loaded = loader.load(self.model, tensors, quantiser, self.dtype, mapping)
        bad = (set(loaded.missing) | loaded.mismatched.keys() | loaded.failed.keys()) - self.unknown
        expected = {}
        if bad or self.names_only:
            expected = loader.expected_state(self.model, loaded.before, mapping)
        verdict = _Verdict(self, loaded, tensors, expected, loader.land(expected, self.model, loaded.before, mapping))
        verdict.judge(bad)
        return LoadRecord(
            model=self.built.identity,
            route=self._route(),
            missing=tuple(verdict.missing.values()),
            unexpected=(*loaded.unexpected, *verdict.extra),
            ignored=loaded.ignored,
            wrong_shapes=tuple(verdict.wrong_shapes.values()),
            wrong_dtypes=() if self.names_only else tuple(self._wrong_dtypes(loaded)),
            failures=tuple(verdict.failures),
            ties=tuple(self._ties(loaded)),
            expected_bytes=self._expected_bytes(expected, loaded) if self.names_only else None,
            dimensions=_dimensions(self.built),
            dtype_named=BF16_ASSUMED not in self.built.assumptions,
            packed_bits=self.quantisation.bits if self.quantisation else None,
            parts_checked=not self.packed and not any(landing.unpacked for landing in loaded.landings.values()),
            notes=tuple(note for note in self.built.identity.notes if "quantization_config" not in note),  # see route
        )

    def _tensors(self, dense: Parts, mapping: loader.Conversions) -> State:
        """Meta tensors to load. A shape that is not known is taken from the model, where it has one for this name."""
        tensors: State = {}
        open_names = [name for name, part in dense.items() if part.shape is None]
        wanted: State = {}
        landings: dict[str, Landing] = {}
        state = self.model.state_dict()
        if open_names:
            landings = loader.land(dense, self.model, state, mapping)
            wanted = loader.expected_state(self.model, state, mapping)
        for name, part in dense.items():
            if part.shape is not None:
                tensors[name] = meta_tensor(part, self.dtype)
                continue
            landing = landings.get(name)
            guess = wanted.get(name)
            if guess is None and landing is not None and landing.converter is None:
                guess = state[landing.parameter]
            elements = self.packed[name].elements if name in self.packed else None
            if guess is not None and elements not in (None, guess.numel()):
                guess = torch.empty(elements or 0, device="meta", dtype=self.dtype)
            if guess is None and landing is not None:
                self.unknown.update(landing.parameters)
                continue
            tensors[name] = torch.empty(0, device="meta") if guess is None else guess
        return tensors

    def _route(self) -> str:
        quantised = self.quantisation
        if quantised is None:
            return "transformers' loader on the meta device"
        if quantised.quantiser is not None:
            return f"transformers' {quantised.method} quantiser and loader on the meta device"
        over = (
            f"the matrices that the {quantised.method} parts stand for" if quantised.known else "the tensors as stored"
        )
        return f"transformers' loader on the meta device, over {over} ({quantised.method}: {quantised.reason})"

    def _wrong_dtypes(self, loaded: Loaded) -> Iterable[WrongDtype]:
        for name, landing in loaded.landings.items():
            part = self.parts.get(name)
            if part is None or part.dtype is None or name in self.packed or landing.unpacked:
                continue
            found, wanted = SHORT_NAMES[part.dtype], dtype_name(loaded.before[landing.parameter].dtype)
            if found == wanted or part.dtype == "F4" or {found, wanted} == {"uint8", "fp8_e8m0fnu"}:
                continue
            if found == self.built.dtype and wanted == "fp32":
                continue  # a parameter that the class keeps in fp32 may be stored like all the others
            yield WrongDtype(name=name, expected=wanted, found=found)

    def _ties(self, loaded: Loaded) -> Iterable[Tie]:
        stored: dict[str, str] = {}
        for name, landing in loaded.landings.items():
            stored.setdefault(landing.parameter, name)
        for tied, kept in self.model.all_tied_weights_keys.items():
            if tied in stored and kept in stored:
                yield Tie(kept=stored[kept], tied=stored[tied])

    def _expected_bytes(self, expected: State, loaded: Loaded) -> int | None:
        """Bytes of an index's tensors at the model's shapes; None as soon as one of them is not known."""
        total = 0
        for name in self.parts:
            landing = loaded.landings.get(name)
            tensor = expected.get(name)
            if tensor is None and landing is not None and landing.converter is None:
                tensor = loaded.before[landing.parameter]
            if tensor is None or self.packed:
                return None
            total += tensor_bytes(tuple(tensor.shape), dtype_name(tensor.dtype))
        return total


@dataclass(slots=True)
class _Verdict:
    """The loader's complaints about parameters, told as stored and expected tensors. Filled by `judge`."""

    comparison: _Comparison
    loaded: Loaded
    tensors: State
    expected: State
    expected_landings: Mapping[str, Landing]
    missing: dict[str, ExpectedTensor] = field(default_factory=dict)
    wrong_shapes: dict[str, WrongShape] = field(default_factory=dict)
    extra: dict[str, None] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)

    def judge(self, bad: set[str]) -> None:
        """Explain every parameter that did not load as it should."""
        if not bad:
            return
        needed, given = _owners(self.expected_landings), _owners(self.loaded.landings)
        vocabulary = _vocabulary(self.comparison.model)
        explained: set[tuple[str, ...]] = set()
        for parameter in sorted(bad, key=lambda name: (name not in self.loaded.failed, name)):
            names = set(needed[parameter]), set(given[parameter])
            if not self._explain(parameter, *names, parameter in vocabulary):
                self._explain_whole(parameter, given[parameter], explained)

    def _explain(self, parameter: str, needed: set[str], given: set[str], vocabulary: bool) -> bool:
        """Compare by names what one parameter needs with what it was given; whether that shows a difference."""
        lacking = sorted(needed - given)
        if needed and len(given - needed) >= len(lacking):
            lacking = []  # another spelling of the same tensors
        for name in lacking:
            self.missing[name] = _expected(name, self.expected[name], head=self._is_head(parameter))
        strange = sorted(given - needed) if needed and len(given) > len(needed) else []
        self.extra |= dict.fromkeys(strange)
        wrong = False
        for name in sorted(needed & given):
            wanted, found = tuple(self.expected[name].shape), tuple(self.tensors[name].shape)
            if wanted != found:
                wrong = True
                self.wrong_shapes[name] = WrongShape(name=name, expected=wanted, found=found, vocabulary=vocabulary)
        return bool(lacking or strange or wrong)

    def _explain_whole(self, parameter: str, given: list[str], explained: set[tuple[str, ...]]) -> None:
        """The names fit and still the parameter does not load: say so of the parameter itself."""
        names = tuple(given)
        reference = self.loaded.before[parameter]
        if not names:
            self.missing[parameter] = _expected(parameter, reference, head=self._is_head(parameter))
        elif parameter in self.loaded.failed:
            self.failures.append(Failure(parameter=parameter, names=names, reason=self.loaded.failed[parameter]))
        elif parameter in self.loaded.mismatched and len(names) == 1:
            self.wrong_shapes[names[0]] = WrongShape(
                name=names[0], expected=tuple(reference.shape), found=self.loaded.mismatched[parameter]
            )
        elif names not in explained:
            found = self.loaded.mismatched.get(parameter)
            reason = f"they make {list(found)}" if found else "nothing comes of them"
            wanted = f"{reason}; the parameter is {list(reference.shape)}"
            self.failures.append(Failure(parameter=parameter, names=names, reason=wanted))
        explained.add(names)

    def _is_head(self, parameter: str) -> bool:
        prefix = self.comparison.model.base_model_prefix
        return hasattr(self.comparison.model, prefix) and not parameter.startswith(f"{prefix}.")


def _owners(landings: Mapping[str, Landing]) -> defaultdict[str, list[str]]:
    owners: defaultdict[str, list[str]] = defaultdict(list)
    for name, landing in landings.items():
        for parameter in landing.parameters:
            owners[parameter].append(name)
    return owners


def _compare_plain(built: BuiltModel, parts: Parts) -> LoadRecord:
    """A module that is not transformers': names and shapes as `load_state_dict` wants them."""
    state = built.module.state_dict()
    missing = [_expected(name, tensor) for name, tensor in state.items() if name not in parts]
    shapes, dtypes = [], []
    for name, tensor in state.items():
        part = parts.get(name)
        if part is None or part.shape is None or part.dtype is None:
            continue
        if part.shape != tuple(tensor.shape):
            shapes.append(WrongShape(name=name, expected=tuple(tensor.shape), found=part.shape))
        if SHORT_NAMES[part.dtype] != dtype_name(tensor.dtype):
            found = SHORT_NAMES[part.dtype]
            dtypes.append(WrongDtype(name=name, expected=dtype_name(tensor.dtype), found=found))
    return LoadRecord(
        model=built.identity,
        route="the module's own state_dict",
        missing=tuple(missing),
        unexpected=tuple(name for name in parts if name not in state),
        wrong_shapes=tuple(shapes),
        wrong_dtypes=tuple(dtypes),
    )


@lru_cache(maxsize=4096)
def meta_tensor(part: Part, dtype: torch.dtype) -> torch.Tensor:
    """A meta tensor of a stored tensor's shape, the same for equal ones: nothing is ever written to it.

    fp4 lies two to a byte in torch; fp6, which torch does not have, is taken as bytes (its own name is compared later).
    """
    shape = part.shape or ()
    if part.dtype in ("F6_E2M3", "F6_E3M2"):
        return torch.empty(shape, dtype=torch.uint8, device="meta")
    if part.dtype == "F4" and shape:
        return torch.empty((*shape[:-1], shape[-1] // 2), dtype=torch.float4_e2m1fn_x2, device="meta")
    name = None if part.dtype is None else SHORT_NAMES[part.dtype]
    return torch.empty(shape, dtype=dtype if name is None else torch_dtype(name), device="meta")


def _expected(name: str, tensor: torch.Tensor, *, head: bool = False) -> ExpectedTensor:
    return ExpectedTensor(name=name, shape=tuple(tensor.shape), dtype=dtype_name(tensor.dtype), head=head)


def _vocabulary(model: PreTrainedModel) -> set[str]:
    """Parameters whose first dimension counts tokens."""
    found: set[str] = set()
    for get in (model.get_input_embeddings, model.get_output_embeddings):
        try:
            module: nn.Module | None = get()
        except (NotImplementedError, AttributeError):
            continue
        names = [name for name, other in model.named_modules() if other is module and module is not None]
        found |= {f"{name}.{kind}" for name in names for kind in ("weight", "bias")}
    return found


def _dimensions(built: BuiltModel) -> dict[str, int]:
    if built.config is None:
        return {}
    text = built.config.get_text_config()
    values = {name: _field(text, name) for name in DIMENSIONS}
    heads, width = values["num_attention_heads"], _field(text, "hidden_size")
    if (
        values["head_dim"] is None
        and isinstance(heads, int)
        and isinstance(width, int)
        and heads
        and width % heads == 0
    ):
        values["head_dim"] = width // heads  # what attention does where no width is named
    return {name: value for name, value in values.items() if isinstance(value, int)}


def _field(config: PreTrainedConfig, name: str) -> Any:
    """A config's field; None where it has none, or one for each layer (Gemma 4 then refuses to give one for all)."""
    try:
        return getattr(config, name, None)
    except Exception:
        return None
