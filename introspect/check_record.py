"""What `check` gathers before it judges: the checkpoint's own words, and what transformers' loader made of them."""

from __future__ import annotations

from dataclasses import dataclass, field

from introspect.checkpoint import Checkpoint
from introspect.packed import Packed
from introspect.params import option
from introspect.records import ModelIdentity


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckParams:
    """What to check against what."""

    model: str | None = option(
        None, "config.json, folder, Hub id, file.py:factory; left out: the config beside the files", positional=True
    )
    checkpoint: str | None = option(
        None, ".safetensors file, folder, index.json or Hub id; left out: MODEL's own", positional=True
    )
    files_only: bool = option(False, "judge the files alone, against no model")
    fix_index: str | None = option(None, "write a corrected index to this new file", metavar="OUT")
    trust_remote_code: bool = option(False, "run the Python code of the model's repository")
    offline: bool = option(False, "never ask the network")
    revision: str | None = option(None, "branch, tag or commit on the Hub", metavar="REV")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedTensor:
    """A tensor the model needs, by the name the checkpoint would give it. `dtype` is a short name of units.

    `head`: it lies outside the base model, so that a checkpoint of the base alone has no such tensor.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    head: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class WrongShape:
    """A stored tensor of another shape than the model needs. `vocabulary`: its first dimension counts tokens."""

    name: str
    expected: tuple[int, ...]
    found: tuple[int, ...]
    vocabulary: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class WrongDtype:
    """A stored tensor of another dtype than the loader would turn it into."""

    name: str
    expected: str
    found: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A parameter that transformers' conversion could not assemble from the stored tensors `names`."""

    parameter: str
    names: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Tie:
    """Two stored names that the model holds as one parameter."""

    kept: str
    tied: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRecord:
    """What would load. Names are the checkpoint's. `route` says how that is known.

    `ignored`: stored, and left out by the class on purpose. `expected_bytes`: the sum over the names of an index at the
    model's shapes and dtypes, None when some are unknown. `dimensions`: the config's numbers that explain a shape
    (num_hidden_layers, num_attention_heads, num_key_value_heads, head_dim). `dtype_named`: whether the config names a
    dtype, so that another one is worth saying. `packed_bits`: bits per weight of a quantised config, None if it names
    none; `parts_checked`: every stored tensor had a parameter of its own to be compared with (False: some were put
    together first, by a quantiser's operation or by introspect.packed, and a part that lacks may not have been missed).
    """

    model: ModelIdentity
    route: str
    missing: tuple[ExpectedTensor, ...] = ()
    unexpected: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    wrong_shapes: tuple[WrongShape, ...] = ()
    wrong_dtypes: tuple[WrongDtype, ...] = ()
    failures: tuple[Failure, ...] = ()
    ties: tuple[Tie, ...] = ()
    expected_bytes: int | None = None
    dimensions: dict[str, int] = field(default_factory=dict)
    dtype_named: bool = True
    packed_bits: int | None = None
    parts_checked: bool = True
    notes: tuple[str, ...] = ()

    @property
    def named(self) -> set[str]:
        """Tensors that something was said of already."""
        return {*(one.name for one in self.missing), *(one.name for one in self.wrong_shapes), *self.unexpected}

    @property
    def fits(self) -> bool:
        """Whether every tensor found its place and every parameter its tensor."""
        return not (self.missing or self.unexpected or self.wrong_shapes or self.failures)


@dataclass(frozen=True, slots=True, kw_only=True)
class SameBytes:
    """Two stored tensors whose data was compared: all of it, or `sampled` blocks of it. Names are (file, tensor)."""

    first: tuple[str, str]
    second: tuple[str, str]
    equal: bool
    sampled: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckRecord:
    """Everything `check` knows. `load` None: no model was given or found, the files are judged alone."""

    checkpoint: Checkpoint
    load: LoadRecord | None
    packed: tuple[Packed, ...] = ()
    compared: tuple[SameBytes, ...] = ()
    index_written: str | None = None
