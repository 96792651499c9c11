"""Fold a recorded loop: consecutive equal blocks of ops become one block and a count.

Two ops are equal when they are the same function in the same module on operands of the same shapes. Lists whose length
follows the loop (the states a scan stacks at its end) become one operand with the length as its leading dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

from introspect.records import Op, Repeat, Tensor
from introspect.units import tensor_bytes

MIN_COUNT = 3  # equal blocks in a row that count as a loop
MAX_PERIOD = 512  # ops of a loop body; the longest seen is a chunk of gated delta rule, about 60


def fold(ops: Sequence[Op], tensors: list[Tensor]) -> tuple[Op | Repeat, ...]:
    """The ops with every loop folded. `tensors` grows by the operands that stand for lists."""
    gathered = [_gather_lists(op, tensors) for op in ops]
    numbers: dict[object, int] = {}
    codes = [numbers.setdefault(_signature(op, tensors), len(numbers)) for op in gathered]
    return _fold(gathered, codes)


def _fold(ops: Sequence[Op], codes: Sequence[int]) -> tuple[Op | Repeat, ...]:
    found: list[Op | Repeat] = []
    places: dict[int, list[int]] = {}
    for position, code in enumerate(codes):
        places.setdefault(code, []).append(position)
    start = 0
    while start < len(ops):
        period, count = _longest_loop(codes, start, places)
        if count >= MIN_COUNT:
            body = (
                _fold(ops[start : start + period], codes[start : start + period])
                if period > MIN_COUNT
                else ops[start : start + period]
            )
            found.append(Repeat(body=tuple(body), count=count))
            start += period * count
        else:
            found.append(ops[start])
            start += 1
    return tuple(found)


def _longest_loop(codes: Sequence[int], start: int, places: dict[int, list[int]]) -> tuple[int, int]:
    """(period, count) of the loop at `start` that covers most ops; the shorter period among equals."""
    best, covered = (1, 1), 1
    for other in places[codes[start]]:
        period = other - start
        if period <= 0:
            continue
        if period > MAX_PERIOD or start + MIN_COUNT * period > len(codes):
            break
        block = codes[start : start + period]
        count = 1
        while codes[start + count * period : start + (count + 1) * period] == block:
            count += 1
        if count >= MIN_COUNT and period * count > covered:
            best, covered = (period, count), period * count
    return best


def _gather_lists(op: Op, tensors: list[Tensor]) -> Op:
    if len(op.inputs) < MIN_COUNT and len(op.outputs) < MIN_COUNT:
        return op
    if op.gemms:
        return op
    return replace(op, inputs=_gather(op.inputs, tensors), outputs=_gather(op.outputs, tensors))


def _gather(indices: tuple[int, ...], tensors: list[Tensor]) -> tuple[int, ...]:
    """Runs of equal-shaped operands as one operand with the run's length in front."""
    found: list[int] = []
    for _, group in groupby(indices, key=lambda i: (tensors[i].shape, tensors[i].dtype, tensors[i].role)):
        run = list(group)
        if len(run) < MIN_COUNT:
            found.extend(run)
            continue
        first = tensors[run[0]]
        shape = (len(run), *first.shape)
        tensors.append(replace(first, shape=shape, storage_bytes=tensor_bytes(shape, first.dtype)))
        found.append(len(tensors) - 1)
    return tuple(found)


def _signature(op: Op, tensors: list[Tensor]) -> object:
    def shapes(indices: tuple[int, ...]) -> object:
        return tuple((t.shape, t.dtype, t.parameter) for t in (tensors[i] for i in indices))

    products = tuple((g.kind, g.batch, g.m, g.k, g.n, g.rows, g.direction) for g in op.gemms)
    return op.name, op.module, op.backward, shapes(op.inputs), shapes(op.outputs), products
