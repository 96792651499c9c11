"""Options that several commands share, as base classes of their `Params`.

Every analyzer has a frozen dataclass `Params`; its fields are the command's options (underscores become dashes, a tuple
is a repeatable option, a bool is a flag). `option()` attaches the help text, choices and metavar that the command line
shows. Field defaults are the conventions of docs/conventions.md. The base classes have no slots, since Python lets no
class inherit from two that have.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from introspect.errors import OptionError
from introspect.records import Phase, Routing, RunShape, Trace

MOST = 10**9
"""Sequences: beyond a billion, sizes of tensors leave 64 bits."""
MOST_NEW_TOKENS = 2**21
"""New tokens a sequence: their positions and mask rows are real, about 1.2 kB of memory each."""
MOST_TOKENS = 2**24
"""Cached tokens a sequence: their mask columns are real, some tens of bytes each."""


def option(
    default: Any,
    help: str,
    *,
    choices: tuple[str, ...] = (),
    metavar: str = "",
    short: str = "",
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    positional: bool = False,
) -> Any:
    """A dataclass field that the command line turns into `--name` with this help, or into an argument if `positional`.

    Bounds are checked for every caller. Without any, an integer is a size (at least 1) and a float is at least 0.
    """
    metadata = {
        "help": help,
        "choices": choices,
        "metavar": metavar,
        "short": short,
        "at_least": at_least,
        "above": above,
        "at_most": at_most,
        "positional": positional,
    }
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class RunParams:
    """What to run."""

    phase: Phase = option("prefill", "what to run", choices=("prefill", "decode", "train"))
    batch: int = option(1, "sequences", short="b", at_most=MOST)
    seq: int = option(2048, "prompt tokens per sequence (prefill, train)", short="s", at_most=MOST_NEW_TOKENS)
    context: int | None = option(
        None,
        "cached tokens per sequence (default: 2048 in decode, 0 otherwise)",
        short="c",
        at_least=0,
        at_most=MOST_TOKENS,
    )
    dtype: str | None = option(None, "compute in this dtype instead of the config's", metavar="bf16|fp16|fp32|fp64")
    logits: Literal["all", "last"] = option("all", "positions the head runs on", choices=("all", "last"))
    routing: Routing = option("balanced", "how tokens spread over experts", choices=("balanced", "uniform", "zipf"))
    seed: int = option(0, "seed of the routing policy", at_least=0)

    def run_shape(self) -> RunShape:
        """The run these options ask for, with the phase's default context filled in. OptionError for a context that
        the phase cannot have."""
        if self.phase == "train" and self.context:
            raise OptionError("--context", self.context, "none with --phase train: a training step has no cache")
        context = self.context if self.context is not None else (2048 if self.phase == "decode" else 0)
        return RunShape(
            phase=self.phase,
            batch=self.batch,
            seq=1 if self.phase == "decode" else self.seq,
            context=context,
            dtype=self.dtype,
            logits=self.logits,
            routing=self.routing,
            seed=self.seed,
        )


@dataclass(frozen=True, kw_only=True)
class TrainParams:
    """Which training step to run."""

    batch: int = option(1, "sequences of one rank's step", short="b", at_most=MOST)
    seq: int = option(2048, "tokens per sequence", short="s", at_most=MOST_NEW_TOKENS)
    dtype: str | None = option(None, "compute in this dtype instead of the config's", metavar="bf16|fp16|fp32|fp64")
    routing: Routing = option("balanced", "how tokens spread over experts", choices=("balanced", "uniform", "zipf"))
    seed: int = option(0, "seed of the routing policy", at_least=0)

    def run_shape(self) -> RunShape:
        """The step these options ask for, without checkpointing."""
        return RunShape(
            phase="train", batch=self.batch, seq=self.seq, dtype=self.dtype, routing=self.routing, seed=self.seed
        )


@dataclass(frozen=True, kw_only=True)
class GpuParams:
    """On what hardware, and how much of it is assumed to be reached."""

    gpu: tuple[str, ...] = option(("h100-sxm",), "GPU name, repeatable (see `introspect gpus`)", metavar="NAME")
    gpu_file: str | None = option(None, "JSON file with more GPUs", metavar="FILE")
    utilization: float = option(1.0, "share of GPU memory that may be used", above=0, at_most=1)
    mfu: float = option(1.0, "share of peak FLOP/s that is reached", above=0, at_most=1)
    mbu: float = option(1.0, "share of memory bandwidth that is reached", above=0, at_most=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessParams:
    """How a model may be looked for: options of every command that takes one, kept out of the analyzers."""

    trust_remote_code: bool = option(False, "run the Python code of the model's repository")
    offline: bool = option(False, "never ask the network")
    revision: str | None = option(None, "branch, tag or commit of a Hub model", metavar="REV")
    no_cache: bool = option(False, "neither read nor write stored traces")


@dataclass(frozen=True, kw_only=True)
class PlotParams:
    """For commands whose Result has a `figure`."""

    plot: str | None = option(None, "draw the figure into this file too (.svg or .png)", metavar="FILE")


class Traces(Protocol):
    """Where an analyzer gets its records from: a model that can be run at any shape, or one stored trace."""

    def __call__(self, run: RunShape) -> Trace:
        """The record of this run. Raises TraceShapeError when only another run is stored."""
        ...

    def other(self, model: str) -> Traces:
        """Records of another model (a draft, the B of a diff), found the same way."""
        ...

    def gather(self, function: str, **options: Any) -> Any:
        """A fact that no run shows, from a function of hooks/ ("rope.gather_scaled_rope") given the built module.

        A function with an argument `inputs` is told the inputs that came with the model. The model is built, and torch
        imported, only now. Raises NoModuleError for a stored trace.
        """
        ...


Analyze = Callable[..., Any]
