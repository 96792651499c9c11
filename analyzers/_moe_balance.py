"""How evenly a step's rows are spread over experts and ranks, under the routing that a run was made with."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from introspect.records import ExpertCall, Trace


@dataclass(frozen=True, slots=True)
class Balance:
    """Rows of every expert, for each MoE layer, and over how many ranks of neighbouring experts they lie.

    All means are over layers; 1 is even.
    """

    loads: tuple[tuple[int, ...], ...]
    ranks: int = 1

    @property
    def busy_experts(self) -> float:
        """Experts that get a row at all."""
        return _mean(sum(1 for rows in load if rows) for load in self.loads)

    @property
    def rows_mean(self) -> float:
        """Rows of an expert on average, idle ones counted."""
        return _mean(sum(load) / len(load) for load in self.loads)

    @property
    def rows_max(self) -> int:
        """Rows of the busiest expert of all layers."""
        return max(map(max, self.loads))

    @property
    def imbalance(self) -> float:
        """The busiest expert's rows over the mean."""
        return _mean(map(_largest_over_mean, self.loads))

    @property
    def rank_imbalance(self) -> float:
        """The busiest rank's rows over the mean."""
        return _mean(_largest_over_mean(self._by_rank(load)) for load in self.loads)

    @property
    def slowest_rank_rows(self) -> int:
        """Rows of the busiest rank of all layers."""
        return max(max(self._by_rank(load)) for load in self.loads)

    def dropped_share(self, capacity: int | None) -> float | None:
        """Share of rows beyond `capacity` rows an expert; None without a capacity."""
        if capacity is None:
            return None
        routed = sum(map(sum, self.loads))
        return sum(max(0, rows - capacity) for load in self.loads for rows in load) / routed if routed else 0.0

    def _by_rank(self, load: tuple[int, ...]) -> tuple[int, ...]:
        each = len(load) // self.ranks
        return tuple(sum(load[start : start + each]) for start in range(0, each * self.ranks, each))


def expert_calls(trace: Trace) -> dict[str, ExpertCall]:
    """The first expert call of every MoE block, by the module that made it."""
    found: dict[str, ExpertCall] = {}
    for op, _ in trace.walk():
        if op.experts is not None and not op.backward:
            found.setdefault(op.module, op.experts)
    return found


def balance_of(trace: Trace, ranks: int) -> Balance:
    """The balance of a run with at least one MoE block."""
    return Balance(tuple(call.routed_rows for call in expert_calls(trace).values()), ranks)


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found)


def _largest_over_mean(load: tuple[int, ...]) -> float:
    """1 when nothing was routed."""
    return max(load) * len(load) / sum(load) if sum(load) else 1.0
