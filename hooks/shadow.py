"""Shadow values: real values for the few meta tensors whose value follows from real inputs alone.

Ids, positions, masks and counts do not depend on weights, so a recipe kept beside their storage can compute them on the
CPU, but only when somebody asks (`.item()`, `nonzero`, `tolist`): eager twins of everything cost several times the run.
Recipes belong to storages, not tensors: views need none, and an in-place write makes a new version of the storage.
A value that depends on weights has no recipe; a decision taken on one is an assumption and is recorded as such.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from introspect.hooks.meta_kernels import MetaKernels
from introspect.records import Decision

aten = torch.ops.aten

# Elements above which a twin is not computed: a boolean mask of 64 Mi entries takes tens of milliseconds and 64 MiB.
MAX_ELEMENTS = 1 << 26

# Ops whose answer or output shape depends on values: meta has no kernel for them.
ASKING = {
    aten._local_scalar_dense.default: "Tensor.item",
    aten.nonzero.default: "torch.nonzero",
    aten.masked_select.default: "torch.masked_select",
    aten.equal.default: "torch.equal",
    aten._unique2.default: "torch.unique",
    aten.unique_consecutive.default: "torch.unique_consecutive",
    aten.unique_dim.default: "torch.unique",
    aten.bincount.default: "torch.bincount",
    aten.repeat_interleave.Tensor: "torch.repeat_interleave",
}

# Ops whose result a matrix may give values to, and the cast of such a matrix.
PRODUCTS = {aten.mm.default, aten.addmm.default, aten.bmm.default, aten.linear.default, aten._to_copy.default}
Draw = Callable[[tuple[int, ...], torch.dtype], torch.Tensor]

# Values of one product beyond which they are not drawn: 32 Ki tokens over 256 experts take a second a layer.
MOST_DRAWN = 1 << 23

# An exchange of counts between ranks: what arrives follows from no value of this rank.
EXCHANGE = torch.ops.c10d.alltoall_base_.default

# Factories that take shape or dtype of a tensor and never its values: what they fill in (None: their last argument).
LIKE: dict[Any, Any] = {
    aten.zeros_like.default: 0,
    aten.ones_like.default: 1,
    aten.full_like.default: None,
    aten.new_zeros.default: 0,
    aten.new_ones.default: 1,
    aten.new_full.default: None,
}

# Frames of these folders relay a question; the line that asked lies outside them.
RELAYS = (os.path.dirname(torch.__file__), os.path.dirname(os.path.abspath(__file__)), os.path.dirname(__file__), "<")


@dataclass(slots=True)
class Recipe:
    """How to compute one version of a storage. `layout` is (shape, stride, offset) of the output that defines it."""

    func: Any
    args: Any
    kwargs: dict[str, Any]
    output: int | None  # which output of the call, None when it has one
    layout: tuple[tuple[int, ...], tuple[int, ...], int]
    before: Source | None = None  # in-place: the storage's version before the write
    value: torch.Tensor | None = None


@dataclass(slots=True)
class Source:
    """A tensor operand of a recipe: a version of a storage and the view taken of it."""

    recipe: Recipe
    layout: tuple[tuple[int, ...], tuple[int, ...], int]


@dataclass(slots=True)
class Shadow:
    """Recipes by storage address, and the decisions that were taken. `module_path` tells who is running, `received`
    what the next exchange of counts brings from the other ranks."""

    decisions: list[Decision] = field(default_factory=list)
    module_path: Any = None
    received: Callable[[], torch.Tensor] | None = None
    _kernels: MetaKernels = field(default_factory=MetaKernels)
    _recipes: dict[int, Recipe] = field(default_factory=dict)
    _products: dict[int, Draw] = field(default_factory=dict)  # storage of a matrix, as it is or cast -> its products
    _kept: list[Any] = field(default_factory=list)

    def give(self, tensor: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Say that the meta tensor `tensor` has this CPU value; returns `tensor`."""
        recipe = Recipe(None, (), {}, None, _layout(tensor), value=value.contiguous())
        self._recipes[tensor.untyped_storage()._cdata] = recipe
        self._kept.append(tensor)
        return tensor

    def give_later(self, tensor: torch.Tensor, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Like `give`, with a value that is computed when somebody asks."""
        self._recipes[tensor.untyped_storage()._cdata] = Recipe(compute, (), {}, None, _layout(tensor))
        self._kept.append(tensor)
        return tensor

    def give_products(self, matrix: torch.Tensor, draw: Draw) -> None:
        """Say that whatever is multiplied by `matrix` [n, d] gives the values that `draw(shape, dtype)` makes."""
        self._products[getattr(matrix, "_local_tensor", matrix).untyped_storage()._cdata] = draw

    def knows(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor's value follows (without computing it)."""
        return tensor.device.type != "meta" or tensor.untyped_storage()._cdata in self._recipes

    def value(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The CPU value of `tensor`; None when it depends on weights or is too large to compute."""
        if tensor.device.type != "meta":
            return tensor
        recipe = self._recipes.get(tensor.untyped_storage()._cdata)
        if recipe is None or prod(recipe.layout[0]) > MAX_ELEMENTS:
            return None
        with _disable_current_modes(), torch.no_grad():
            return _evaluate(Source(recipe, _layout(tensor)))

    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run one dispatched op; answer it from values where meta cannot; keep recipes up to date."""
        if func in ASKING and _on_meta(args):
            return self._answer(func, args, kwargs)
        if func is aten.index.Tensor and any(t is not None and t.dtype in (torch.bool, torch.uint8) for t in args[1]):
            args = (args[0], self._masks_to_indices(args[1]))
        out = self._kernels.run(func, args, kwargs)
        self._follow(func, args, kwargs, out)
        if self._products and func in PRODUCTS:
            self._draw(func, args, out)
        return out

    def _draw(self, func: Any, args: Any, out: torch.Tensor) -> None:
        """Values for a product by a matrix of `give_products`; a cast of the matrix stands for it."""
        addresses = (arg.untyped_storage()._cdata for arg in args if isinstance(arg, torch.Tensor))
        draw = next((self._products[address] for address in addresses if address in self._products), None)
        if draw is None:
            return
        if func is aten._to_copy.default:
            self._products[out.untyped_storage()._cdata] = draw
            self._kept.append(out)
        elif out.numel() <= MOST_DRAWN:
            shape, dtype = tuple(out.shape), out.dtype
            self.give_later(out, lambda: draw(shape, dtype))

    def _fill_like(self, func: Any, args: Any, out: torch.Tensor) -> None:
        """One number everywhere, whatever the values of the tensor whose shape or dtype was taken."""
        number: float = args[-1] if LIKE[func] is None else LIKE[func]
        shape, dtype = tuple(out.shape), out.dtype
        self.give_later(out, lambda: torch.full(shape, number, dtype=dtype))

    def _follow(self, func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> None:
        recipes = self._recipes
        outputs = [out] if isinstance(out, torch.Tensor) else out
        if func is EXCHANGE:
            self._recipes.pop(args[0].untyped_storage()._cdata, None)
            if self.received is not None:
                self.give_later(args[0], self.received)
            return
        if not isinstance(outputs, (list, tuple)):
            return
        known, written = True, set()
        for tensor in _meta_tensors(args, kwargs):
            address = tensor.untyped_storage()._cdata
            written.add(address)
            known = known and address in recipes
        if not known and func in LIKE:
            self._fill_like(func, args, out)
            return
        known = known and torch.Tag.nondeterministic_seeded not in func.tags
        mutates = func._schema.is_mutable
        for position, tensor in enumerate(outputs):
            if not isinstance(tensor, torch.Tensor) or tensor.device.type != "meta":
                continue
            address = tensor.untyped_storage()._cdata
            if address in written and not mutates:
                continue  # a view shares its storage's recipe
            if not known:
                recipes.pop(address, None)
                continue
            before = recipes.get(address) if address in written else None
            self._kept.append(tensor)
            recipes[address] = Recipe(
                func,
                _capture(args, recipes),
                _capture_keywords(kwargs, recipes),
                position if isinstance(out, (list, tuple)) else None,
                before.layout if before is not None else _layout(tensor),
                before=Source(before, _layout(tensor)) if before is not None else None,
            )

    def _answer(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        values = _substitute(args, self.value)
        if values is not None:
            with _disable_current_modes():
                answer = func(*values, **kwargs)
            self._decide(ASKING[func], answer, "value")
            return self._to_meta(answer)
        answer = _default_answer(func, args)
        self._decide(ASKING[func], answer, "assumed")
        return answer

    def _to_meta(self, answer: Any) -> Any:
        if isinstance(answer, torch.Tensor):
            with _disable_current_modes():
                meta = torch.empty_like(answer, device="meta")
            return self.give(meta, answer)
        if isinstance(answer, tuple):
            return tuple(self._to_meta(a) for a in answer)
        return answer

    def _masks_to_indices(self, indices: Any) -> list[Any]:
        positions: list[Any] = []
        for index in indices:
            if index is None or index.dtype not in (torch.bool, torch.uint8):
                positions.append(index)
            else:
                rows = self.run(aten.nonzero.default, (index,), {})
                positions.extend(self.run(aten.select.int, (rows, 1, d), {}) for d in range(index.dim()))
        return positions

    def assume(self, question: str, answer: str) -> None:
        """Record that something was taken for granted because no value could tell."""
        path = self.module_path() if self.module_path else ""
        self.decisions.append(
            Decision(question=question, answer=answer, answered="assumed", where=asking_line(), module=path)
        )

    def _decide(self, question: str, answer: Any, answered: Any) -> None:
        text = f"shape {tuple(answer.shape)}" if isinstance(answer, torch.Tensor) else repr(answer)
        path = self.module_path() if self.module_path else ""
        self.decisions.append(
            Decision(question=question, answer=text[:80], answered=answered, where=asking_line(), module=path)
        )

    def to_list(self, tensor: torch.Tensor) -> Any:
        """What `tensor.tolist()` would give; zeros, recorded as an assumption, when no value follows."""
        value = self.value(tensor)
        if value is None:
            with _disable_current_modes():
                value = torch.zeros(tuple(tensor.shape), dtype=tensor.dtype)
            self._decide("Tensor.tolist", value, "assumed")
        else:
            self._decide("Tensor.tolist", value, "value")
        with _disable_current_modes():
            return value.tolist()


def asking_line() -> str:
    """file:line of the innermost frame that is neither torch's nor ours, with the file's last two path parts."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(RELAYS):
        if frame.f_back is None:
            break
        frame = frame.f_back
    return f"{'/'.join(frame.f_code.co_filename.split('/')[-2:])}:{frame.f_lineno}"


def raising_line(error: BaseException) -> str:
    """file:line where an error left the innermost frame that is neither torch's nor ours."""
    place = "the model"
    trace = error.__traceback__
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if not file.startswith(RELAYS):
            place = f"{'/'.join(file.split('/')[-2:])}:{trace.tb_lineno}"
        trace = trace.tb_next
    return place


def _layout(tensor: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    return tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())


def _on_meta(args: Any) -> bool:
    return any(isinstance(a, torch.Tensor) and a.device.type == "meta" for a in args)


def _meta_tensors(args: Any, kwargs: dict[str, Any]) -> list[torch.Tensor]:
    found = []
    for value in (*args, *kwargs.values()):
        for item in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(item, torch.Tensor) and item.device.type == "meta":
                found.append(item)
    return found


def _capture(value: Any, recipes: dict[int, Recipe]) -> Any:
    if isinstance(value, torch.Tensor):
        if value.device.type != "meta":
            return value
        return Source(recipes[value.untyped_storage()._cdata], _layout(value))
    if isinstance(value, (list, tuple)):
        return type(value)(_capture(item, recipes) for item in value)
    if isinstance(value, torch.device):
        return torch.device("cpu")
    return value


def _capture_keywords(kwargs: dict[str, Any], recipes: dict[int, Recipe]) -> dict[str, Any]:
    return {name: _capture(value, recipes) for name, value in kwargs.items()}


def _evaluate(source: Source) -> torch.Tensor:
    """The value of a view: computes its storage's version (once), then takes the view of it."""
    pending = [source.recipe]
    while pending:  # iterative: chains of in-place writes can be longer than Python's recursion limit
        recipe = pending[-1]
        if recipe.value is not None:
            pending.pop()
            continue
        missing = [s.recipe for s in _sources((recipe.args, recipe.kwargs, recipe.before)) if s.recipe.value is None]
        if missing:
            pending.extend(missing)
        else:
            recipe.value = _compute(recipe)
            pending.pop()
    return _take(source)


def _compute(recipe: Recipe) -> torch.Tensor:
    args, kwargs = _resolve(recipe.args), _resolve(recipe.kwargs)
    func = recipe.func
    if recipe.before is None:
        out = func(*args, **kwargs)
        result: torch.Tensor = out if recipe.output is None else out[recipe.output]
        if "empty" in getattr(recipe.func, "__name__", ""):  # read before it is written, it is at least the same always
            result.zero_()
        shape, stride, _ = recipe.layout
        if result.stride() != stride or result.storage_offset() != 0:
            moved = torch.empty_strided(shape, stride, dtype=result.dtype)
            result = moved.copy_(result)
        return result
    base_value = recipe.before.recipe.value
    assert base_value is not None
    base = base_value.clone()  # the version before stays readable for recipes that used it
    shape, stride, offset = recipe.before.layout
    target = base.as_strided(shape, stride, offset - recipe.layout[2])
    func(target, *args[1:], **kwargs)
    return base


def _take(source: Source) -> torch.Tensor:
    value = source.recipe.value
    assert value is not None
    shape, stride, offset = source.layout
    return value.as_strided(shape, stride, value.storage_offset() + offset - source.recipe.layout[2])


def _sources(value: Any) -> list[Source]:
    if isinstance(value, Source):
        return [value]
    if isinstance(value, (list, tuple)):
        return [s for item in value for s in _sources(item)]
    if isinstance(value, dict):
        return [s for item in value.values() for s in _sources(item)]
    return []


def _resolve(value: Any) -> Any:
    if isinstance(value, Source):
        return _take(value)
    if isinstance(value, (list, tuple)):
        return type(value)(_resolve(item) for item in value)
    if isinstance(value, dict):
        return {name: _resolve(item) for name, item in value.items()}
    return value


def _substitute(args: Any, value_of: Any) -> list[Any] | None:
    values = []
    for arg in args:
        value = value_of(arg) if isinstance(arg, torch.Tensor) else arg
        if value is None and arg is not None:
            return None
        values.append(value)
    return values


def _default_answer(func: Any, args: Any) -> Any:
    """What is assumed when a value depends on weights: false, zero, or an upper bound on the rows selected."""
    tensor = args[0]
    if func is aten._local_scalar_dense.default:
        return False if tensor.dtype is torch.bool else (0.0 if tensor.dtype.is_floating_point else 0)
    if func is aten.equal.default:
        return False
    with _disable_current_modes():
        if func is aten.nonzero.default:
            return torch.empty((tensor.numel(), tensor.dim()), dtype=torch.int64, device="meta")
        if func is aten.masked_select.default:
            return torch.empty((args[1].numel(),), dtype=tensor.dtype, device="meta")
    raise NotImplementedError(
        f"{ASKING[func]} at {asking_line()} needs the values of a tensor that depends on weights; "
        "no shape follows on the meta device"
    )
