"""Rows that hold the record against other routes: other counters on the same run, and a twin that really ran."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from introspect.errors import NoModuleError
from introspect.params import Traces
from introspect.records import RunShape, Trace
from introspect.route_record import CounterRoute, RouteRecord
from introspect.table import Value
from introspect.twin_record import TwinReport

ROUTE_TOKENS = 16  # tokens of the run that other counters see
_MATRIX_OPS = ("aten.mm.default", "aten.addmm.default")


@dataclass(frozen=True, slots=True, kw_only=True)
class SecondRoutes:
    """What the routes say. `rows`: one for each route and kind of op; `agrees` is null where a route has nothing to
    say, and the row's note why. `notes`: which routes did not run."""

    rows: tuple[dict[str, Value], ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def disagreements(self) -> list[str]:
        """A finding for each row that disagrees."""
        return [
            f"{row['route']} disagrees on {row['kind']}: {row['ours']} here, {row['theirs']} there"
            for row in self.rows
            if row["agrees"] is False
        ]


def second_routes(traces: Traces, run: RunShape) -> SecondRoutes:
    """All routes: on a prefill of ROUTE_TOKENS or, where inputs came with the model, on those; none where only a stored
    trace is there."""
    try:
        record: RouteRecord = traces.gather("routes.gather_routes", tokens=ROUTE_TOKENS)
    except NoModuleError:
        return SecondRoutes(notes=("no second route ran: a stored trace has no module to run",))
    silent = [f"second route {one.counter} did not run: {one.problem}" for one in record.counters if one.problem]
    if record.twin is None:
        silent.append(f"second route twin did not run: {record.twin_problem}")
    return SecondRoutes(rows=tuple(_rows(record, traces, run)), notes=tuple(silent))


def _rows(record: RouteRecord, traces: Traces, run: RunShape) -> Iterator[dict[str, Value]]:
    prefill = run.with_(phase="prefill")
    ours = _by_kind(traces(prefill if record.given else prefill.with_(batch=1, seq=ROUTE_TOKENS, context=0)))
    for counter in record.counters:
        yield from _counter_rows(counter, ours)
    yield from _twin_rows(record.twin, record.twin_problem)


def _by_kind(trace: Trace) -> dict[str, int]:
    """FLOPs of the record by the ops that counters tell apart. They count outer products too, which sum nothing."""
    found = {"matrix": 0, "batched": 0, "conv": 0, "grouped": 0, "linear": 0}
    for op, times in trace.walk():
        flops = times * sum(gemm.flops for gemm in op.gemms)
        if op.kind == "outer":
            found["batched"] += times * 2 * trace.tensors[op.outputs[0]].elements
        elif op.name in _MATRIX_OPS:
            found["matrix"] += flops
            found["linear"] += times * sum(gemm.flops for gemm in op.gemms if gemm.kind == "linear")
        elif any(gemm.kind in ("grouped", "conv") for gemm in op.gemms):
            found[op.gemms[0].kind] += flops
        else:
            found["batched"] += flops
    return found


def _counter_rows(counter: CounterRoute, ours: dict[str, int]) -> Iterator[dict[str, Value]]:
    kinds = ("linear", "conv") if counter.counter == "fvcore" else ("matrix", "batched", "conv", "grouped")
    for kind in kinds:
        theirs = counter.flops.get(kind)
        if counter.problem:
            yield _row(counter.counter, kind, ours[kind], None, None, f"did not run: {counter.problem}")
        elif theirs is None and ours[kind]:
            silent = ", ".join(counter.silent[:4])
            yield _row(counter.counter, kind, ours[kind], None, None, f"no formula for it (silent about {silent})")
        elif theirs is not None and theirs < ours[kind] <= theirs + counter.flops.get("matmul", 0):
            note = "the rest may be among its matmuls, of which it does not say what they multiply"
            yield _row(counter.counter, kind, ours[kind], theirs, None, note)
        elif theirs is not None or ours[kind]:
            yield _row(counter.counter, kind, ours[kind], theirs, theirs == ours[kind], "")


def _twin_rows(twin: TwinReport | None, problem: str) -> Iterator[dict[str, Value]]:
    if twin is None:
        yield _row("twin", "all", None, None, None, f"no twin: {problem}")
        return
    for one in twin.agreements:
        note = f"{twin.parameters:,} random parameters, {one.phase}: calls of equal sizes on meta and CPU"
        yield _row("twin", one.kind, one.both + one.meta_only, one.both + one.cpu_only, one.agrees, note)
    error = twin.output_error
    note = "logits under our kernels against the library's own: largest difference over largest logit"
    yield _row("twin", "outputs", None, error, None if error is None else twin.verified or not twin.same_calls, note)


def _row(route: str, kind: str, ours: Value, theirs: Value, agrees: bool | None, note: str) -> dict[str, Value]:
    return {"route": route, "kind": kind, "ours": ours, "theirs": theirs, "agrees": agrees, "note": note}
