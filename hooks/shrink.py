"""A small valid twin of any config: the same kinds of layers, head groups, and experts above top-k, in few parameters.

No field is known by name. A candidate config is accepted when its model builds on meta, its run records the same kinds
of layers (layer_kinds.py), the model of real tensors runs, and something got smaller while nothing grew: parameters,
elements computed, pairs that the attention masks let through. Candidates, in order:

1. fewer layers: as few as show every kind, by whichever integer sets the stack's length;
2. every integer from some size on divided by the same power of two, so that ratios are kept;
3. limits of a run (windows, chunks, an indexer's top-k) down to less than the tokens that are run;
4. only if still large: fields one by one, then in pairs (a state-space model's head count follows from two others).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from accelerate import init_empty_weights
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.initialization import meta_device_safe_creation_ops

from introspect.errors import ShrinkError
from introspect.hooks.config_fields import Fields, Path, cuts, fields_of, integers, read, scaled
from introspect.hooks.layer_kinds import Kind, layer_kinds
from introspect.hooks.observe import observe
from introspect.hooks.replay import listening, replayed
from introspect.records import ModelIdentity, RunShape, Trace

TOKENS = 12  # of the runs that compare candidates; windows are made smaller than this
SMALLEST = 8  # no field is made smaller than this, and no matrix narrower
SMALL = 30_000_000  # parameters with which a model builds and runs on a CPU in about a second
ENOUGH = 4_000_000  # parameters below which fields are no longer shrunk one by one
DEEPER = (2, 3, 4)  # multiples of the fewest layers that are tried where those few make no model
FACTORS = (64, 32, 16, 8, 4, 2)
MAX_LOOKS = 300  # candidates built at most; a build and run of a few small layers takes 10 to 100 ms


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What a candidate's build and run on meta show."""

    fields: Fields
    parameters: int
    elements: int  # of all tensors that ops made
    pairs: int  # that attention masks let through
    narrowest: int  # smallest inner dimension of a product with a weight
    kinds: dict[str, tuple[Kind, ...]]

    @property
    def sizes(self) -> tuple[int, int, int]:
        """The three sizes that shrink."""
        return self.parameters, self.elements, self.pairs


def shrink(model_class: type[PreTrainedModel], config: PreTrainedConfig) -> PreTrainedConfig:
    """The config of a twin of at most `SMALL` parameters. Raises ShrinkError when there is none to be found."""
    search = _Search(model_class, type(config), fields_of(config))
    search.fewer_layers()
    search.narrower_together()
    search.smaller_limits()
    search.one_by_one()
    search.in_pairs()
    if search.best.parameters > SMALL:
        raise ShrinkError(model_class.__name__, f"the smallest found has {search.best.parameters:,} parameters")
    if not search.runs(search.best):
        raise ShrinkError(model_class.__name__, "the smallest found does not run on the CPU")
    return read(type(config), search.best.fields)


def few_layers(model_class: type[PreTrainedModel], config: PreTrainedConfig) -> Fields:
    """The config's fields with every stack cut to the fewest layers that show all its kinds; widths stay."""
    search = _Search(model_class, type(config), fields_of(config))
    search.fewer_layers()
    return search.best.fields


def build_on_meta(model_class: type[PreTrainedModel], config: PreTrainedConfig) -> nn.Module:
    """The model in fp32 on the meta device."""
    with init_empty_weights(include_buffers=True), meta_device_safe_creation_ops():
        model: nn.Module = model_class._from_config(config, dtype=torch.float32).eval()
    return model.to("meta")  # XLNet's torch.FloatTensor knows no device context


def build_with_weights(model_class: type[PreTrainedModel], config: PreTrainedConfig) -> nn.Module:
    """The model in fp32 with the random weights its class initialises, the same each time."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model: nn.Module = model_class._from_config(config, dtype=torch.float32).eval()
        return model


class _Search:
    """The smallest accepted candidate so far, and what every candidate must show."""

    def __init__(
        self, model_class: type[PreTrainedModel], config_class: type[PreTrainedConfig], fields: Fields
    ) -> None:
        self._model_class = model_class
        self._config_class = config_class
        self._looks = 0
        try:
            self.best = self._look(fields)
        except Exception as error:  # a class may refuse what it wrote itself
            problem = f"its config read back from its own fields: {' '.join(str(error).split())}"
            raise ShrinkError(model_class.__name__, problem) from error
        self._kinds = {path: set(kinds) for path, kinds in self.best.kinds.items()}
        self._narrowest = min(SMALLEST, self.best.narrowest)

    def _look(self, fields: Fields) -> Look:
        self._looks += 1
        model = build_on_meta(self._model_class, read(self._config_class, fields))
        trace = observe(model, IDENTITY, RunShape(phase="prefill", seq=TOKENS))
        return Look(
            fields=fields,
            parameters=_count(model),
            elements=sum(trace.tensors[i].elements * times for op, times in trace.walk() for i in op.outputs),
            pairs=sum(op.attention.visible_pairs * times for op, times in trace.walk() if op.attention),
            narrowest=min(_inner_widths(trace), default=1),
            kinds=layer_kinds(model, trace),
        )

    def runs(self, look: Look) -> bool:
        """Whether the model of real tensors prefills and decodes, as we run it (meta knows no index out of range) and
        as the library does (it may read fields that our kernels do not need)."""
        try:
            model = build_with_weights(self._model_class, read(self._config_class, look.fields))
            with listening(model) as heard:
                observe(model, IDENTITY, RunShape(phase="decode", seq=1, context=TOKENS))
            replayed(model, heard)
        except Exception:  # whatever a model's code raises says that this candidate is none
            return False
        return True

    def _seen(self, fields: Fields) -> Look | None:
        """The look of a candidate that shows what it must, else None."""
        if self._looks >= MAX_LOOKS:
            return None
        try:
            look = self._look(fields)
        except Exception:  # a config or model class may refuse a candidate in any way
            return None
        same = {path: set(kinds) for path, kinds in look.kinds.items()} == self._kinds
        return look if same and look.narrowest >= self._narrowest else None

    def _parameters(self, fields: Fields) -> int | None:
        try:
            return _count(build_on_meta(self._model_class, read(self._config_class, fields)))
        except Exception:  # as above
            return None

    def _take(self, look: Look | None) -> bool:
        """Make the candidate the best if it is smaller and runs."""
        if look is None or not self._is_smaller(look) or (look.parameters <= SMALL and not self.runs(look)):
            return False
        self.best = look
        return True

    def _is_smaller(self, look: Look) -> bool:
        pairs = list(zip(look.sizes, self.best.sizes, strict=True))
        return all(new <= old for new, old in pairs) and any(new < old for new, old in pairs)

    def fewer_layers(self) -> None:
        """Cut every stack to the fewest first layers that show all its kinds, at least two, or to some more."""
        for stack, kinds in self.best.kinds.items():
            fewest = max(min(2, len(kinds)), _covering(kinds))
            depths = (fewest, fewest + 1, *(fewest * n for n in DEEPER))
            any(self._cut(stack, keep) for keep in depths if keep < len(kinds))

    def _cut(self, stack: str, keep: int) -> bool:
        for fields in cuts(self.best.fields, len(self.best.kinds[stack]), keep):
            look = self._seen(fields)
            if look is not None and len(look.kinds[stack]) == keep and self._take(look):
                return True
        return False

    def narrower_together(self) -> None:
        """Divide integers from a threshold on by one factor: the largest factor and lowest threshold that will do."""
        while self.best.parameters > ENOUGH and any(self._take(self._seen(f)) for f in self._divided()):
            pass

    def _divided(self) -> Iterator[Fields]:
        sizes = integers(self.best.fields, 2 * SMALLEST)
        for factor in FACTORS:
            for threshold in sorted({size for size in sizes.values() if size >= factor * SMALLEST}):
                chosen = {path: size // factor for path, size in sizes.items() if size >= threshold}
                yield scaled(self.best.fields, chosen)

    def smaller_limits(self) -> None:
        """Lower the integers that bound a run and that no parameter's shape shows: all at once, else one by one."""
        fields = self.best.fields
        limits = [
            path
            for path in integers(fields, SMALLEST + 1)
            if self._parameters(scaled(fields, {path: SMALLEST})) == self.best.parameters
        ]
        if not self._take(self._seen(scaled(fields, dict.fromkeys(limits, SMALLEST)))):
            for path in limits:
                self._take(self._seen(scaled(self.best.fields, {path: SMALLEST})))

    def one_by_one(self) -> None:
        """Divide single fields, the largest first, until there are few parameters or no field will do."""
        progress = True
        while progress and self.best.parameters > ENOUGH:
            progress = sum(self._divide(path) for path, _ in self._largest_first()) > 0

    def _largest_first(self) -> list[tuple[Path, int]]:
        return sorted(integers(self.best.fields, 2 * SMALLEST).items(), key=lambda item: -item[1])

    def _divide(self, path: Path) -> bool:
        size = integers(self.best.fields, 1)[path]
        half = self._seen(scaled(self.best.fields, {path: size // 2}))
        if half is None or not self._is_smaller(half):
            return False
        factors = [factor for factor in FACTORS[:-1] if size // factor >= SMALLEST]
        smaller = (self._seen(scaled(self.best.fields, {path: size // factor})) for factor in factors)
        return any(self._take(look) for look in smaller) or self._take(half)

    def in_pairs(self) -> None:
        """Halve two fields at a time: sizes that only move together."""
        progress = True
        while progress and self.best.parameters > ENOUGH:
            progress = any(self._take(self._seen(fields)) for fields in self._halved_pairs())

    def _halved_pairs(self) -> Iterator[Fields]:
        sizes = integers(self.best.fields, 4)
        for first, size in self._largest_first():
            for second, other in sizes.items():
                if first != second:
                    yield scaled(self.best.fields, {first: size // 2, second: other // 2})


IDENTITY = ModelIdentity(id="twin", class_name="", source="twin", config_sha256="", config={})


def _count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _inner_widths(trace: Trace) -> Iterator[int]:
    for op, _ in trace.walk():
        for gemm in op.gemms:
            weight = gemm.rhs is not None and trace.tensors[gemm.rhs].role == "weight"
            if (weight and gemm.kind in ("linear", "grouped")) or gemm.kind == "attention_qk":
                yield gemm.k


def _covering(kinds: tuple[Kind, ...]) -> int:
    """The fewest first layers among which every kind occurs."""
    return next(k for k in range(1, len(kinds) + 1) if set(kinds[:k]) == set(kinds))
