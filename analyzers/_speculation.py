"""Time of decode and verify steps at any batch, from one record of each, and what a draft adds.

FLOPs, activations and cached bytes grow with the sequences, weights do not (routed experts: the distinct ones expected
for as many tokens). A verify step of q tokens is read off the recorded one in proportion to the tokens: exact but for
the pairs among the q new tokens themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from introspect.analyzers._roofline import Machine, Work, step_work, total_seconds
from introspect.analyzers._step import Step

Seconds = Callable[[int], float | None]
"""Time of a step at a batch; None when the GPU's rate is unknown."""

MOST = 2**20
"""Batches beyond this are not looked at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """What proposes a token: its time at a batch, and the bytes it holds, a sequence's `kv_bytes` at the context."""

    name: str
    seconds: Seconds
    kv_bytes_per_token: int | None = None
    kv_bytes: int | None = None
    weight_bytes: int | None = None


def at(works: Iterable[Work], *, sequences: float, tokens: float, asked: int) -> tuple[Work, ...]:
    """The work of a step of one sequence, for `sequences` of them with `tokens` times its tokens, `asked` in all."""
    return tuple(
        replace(
            work,
            flops=round(work.flops * tokens),
            activation_bytes=round(work.activation_bytes * tokens),
            cache_bytes=round(work.cache_bytes * sequences),
            weight_bytes=work.weight_bytes_of(asked),
        )
        for work in works
    )


def decode_seconds(works: tuple[Work, ...], machine: Machine) -> Seconds:
    """Time of the recorded decode step (one sequence) at any batch."""
    return lambda batch: total_seconds(at(works, sequences=batch, tokens=batch, asked=batch), machine)


def verify_work(decode: Step, verify: Step, queries: int) -> tuple[Work, ...]:
    """The work of the recorded verify step; a model with states scans its few tokens as its decode step does one.

    A scan over several tokens is written for prompts and padded to whole chunks; for a handful an engine takes steps.
    """
    works = step_work(verify)
    stepwise = tuple(replace(work, flops=work.flops * queries) for work in step_work(decode) if _is_scan(work))
    if not decode.states or scan_flops(works) <= scan_flops(stepwise):
        return works
    return (*(work for work in works if not _is_scan(work)), *stepwise)


def scan_flops(works: Iterable[Work]) -> int:
    """FLOPs of products of two activations outside attention."""
    return sum(work.flops for work in works if _is_scan(work))


def _is_scan(work: Work) -> bool:
    return work.flops > 0 and not work.weights and work.kind != "attention"


def part(step: Step, *, layer: bool) -> tuple[Work, ...]:
    """The work of the last layer and of the head, or of the head alone. Of layers the last with attention, if any."""
    structure = step.structure
    heads = {path for i in structure.heads for path in structure.matrices.get(i, ())}
    works = step_work(step)
    layers = [(path, work.kind) for work in works if (path := structure.layers.layer_path(work.module)) is not None]
    attending = [path for path, kind in layers if kind == "attention"]
    last = (attending or [path for path, _ in layers])[-1] if layer and layers else None
    return tuple(
        work
        for work in works
        if heads & set(work.weights) or (last is not None and structure.layers.layer_path(work.module) == last)
    )


@dataclass(frozen=True, slots=True)
class Speculation:
    """A target's decode and verify steps on one GPU, for one context."""

    decode: tuple[Work, ...]
    verify: tuple[Work, ...]
    queries: int  # tokens of the recorded verify step
    machine: Machine

    def decode_seconds(self, batch: int) -> float | None:
        """Time of a plain decode step."""
        return decode_seconds(self.decode, self.machine)(batch)

    def verify_seconds(self, batch: int, gamma: int) -> float | None:
        """Time of a step that verifies gamma drafted tokens: gamma + 1 queries a sequence."""
        asked = batch * (gamma + 1)
        scaled = at(self.verify, sequences=batch, tokens=asked / self.queries, asked=asked)
        return total_seconds(scaled, self.machine)

    def speedup(self, batch: int, gamma: int, alpha: float, draft: Draft) -> float | None:
        """Tokens a second with the draft over tokens a second without."""
        plain, verify, proposing = self.decode_seconds(batch), self.verify_seconds(batch, gamma), draft.seconds(batch)
        if plain is None or verify is None or proposing is None:
            return None
        return expected_tokens(alpha, gamma) * plain / (gamma * proposing + verify)

    def breakeven_batch(self, gamma: int, alpha: float, draft: Draft) -> int | None:
        """The smallest batch beyond the last one that gains; None when none gains or none up to MOST loses."""

        def gains(batch: int) -> bool:
            return (self.speedup(batch, gamma, alpha, draft) or 0.0) > 1

        grid: list[int] = [2**power for power in range(MOST.bit_length())]
        gaining = [batch for batch in grid if gains(batch)]
        if not gaining or gaining[-1] == grid[-1]:
            return None
        low, high = gaining[-1], 2 * gaining[-1]
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if gains(middle) else (low, middle)
        return high

    def gains(self, gamma: int, alpha: float, draft: Draft) -> str | None:
        """At which batches speculation gains; None when the GPU's rate is unknown."""
        most = self.speedup(MOST, gamma, alpha, draft)
        if most is None:
            return None
        if most > 1:
            return "however large the batch"
        return "at no batch" if self.breakeven_batch(gamma, alpha, draft) is None else "below breakeven_batch"


def expected_tokens(alpha: float, gamma: int) -> float:
    """Tokens a step yields when each draft is accepted with probability alpha, independently, until one is not:
    (1 - alpha^(gamma+1)) / (1 - alpha), the sum of alpha^0 .. alpha^gamma (Leviathan et al. 2023, eq. 1)."""
    return sum(alpha**accepted for accepted in range(gamma + 1))
