"""What other counters and a real run say about a model, beside its record."""

from __future__ import annotations

from dataclasses import dataclass

from introspect.twin_record import TwinReport


@dataclass(frozen=True, slots=True, kw_only=True)
class CounterRoute:
    """FLOPs that another counter gives for the run, by kind of op; `problem` says why it gave none.

    Kinds are "matrix" (mm and addmm), "batched" (bmm, attention included), "conv", "linear" (fvcore's name for matrix
    products with a weight) and "matmul" (those of which fvcore does not tell what they multiply). `silent`: ops it met
    and priced at nothing.
    """

    counter: str
    flops: dict[str, int]
    silent: tuple[str, ...] = ()
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteRecord:
    """All second routes: on the inputs that came with the model where `given`, else on a prefill of one sequence.
    `twin` is None where none could be made; `twin_problem` says why."""

    counters: tuple[CounterRoute, ...]
    twin: TwinReport | None
    twin_problem: str = ""
    given: bool = False
