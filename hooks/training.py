"""One training step: forward with labels, loss, backward, and what autograd keeps between the two.

The step runs in training mode (dropout noise is kept, as in a real step) and without a cache; labels are the input
ids. A module that computes no loss is given the sum of its first differentiable output, so every product's backward
runs. With `run.checkpointing` the model's own layers are recomputed by torch's non-reentrant checkpoint, which stops as
soon as all that was saved is back: the last product of a layer is not repeated.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from introspect.hooks.functions import FunctionObserver
from introspect.hooks.inputs import placed, run_on
from introspect.hooks.recorder import Recorder, tensors_in
from introspect.hooks.session import Session
from introspect.hooks.step import Step, accepted_inputs, ids_name, token_ids
from introspect.records import RunShape


def train_step(session: Session, model: nn.Module, run: RunShape, inputs: dict[str, Any] | None) -> Step:
    """Run forward and backward once; with `inputs` on them, else on `batch` sequences of `seq` tokens."""
    recorder = session.recorder
    saved = SavedStorages(recorder, model)
    recomputation = Recomputation(session, saved)
    assumptions: list[str] = []
    with ExitStack() as undo:
        undo.enter_context(_training_mode(model))
        undo.enter_context(torch.enable_grad())
        if run.checkpointing and not _enable_checkpointing(undo, model, recomputation):
            assumptions.append(f"{type(model).__name__} has no gradient checkpointing: nothing was recomputed")
        with saved_tensors_hooks(saved.pack, _unchanged):
            recorder.stage = "forward"
            loss, assumed = _loss(session, model, run, inputs)
        recorder.stage = "backward"
        loss.backward()
    return Step(
        assumptions=(*assumptions, *assumed),
        saved_bytes=sum(saved.bytes.values()),
        saved=tuple(saved.bytes),
        recomputed_bytes=recomputation.largest,
    )


class SavedStorages:
    """Storages that autograd saved for the backward pass and that are no parameter: `bytes` by storage number."""

    def __init__(self, recorder: Recorder, model: nn.Module) -> None:
        self.bytes: dict[int, int] = {}
        self._recorder = recorder
        self._parameters = {recorder.storage(parameter) for parameter in model.parameters()}

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        """A pack hook: take note of the tensor, keep it as it is."""
        self.note(tensor, self.bytes)
        return tensor

    def note(self, tensor: torch.Tensor, into: dict[int, int]) -> None:
        """Enter the tensor's storage into `into` unless it is a parameter's."""
        storage = self._recorder.storage(tensor)
        if storage not in self._parameters:
            into[storage] = tensor.untyped_storage().nbytes()


class Recomputation:
    """Watches each recomputed layer. `largest`: bytes of the largest set saved at once beyond what was held already;
    None when nothing was recomputed."""

    def __init__(self, session: Session, saved: SavedStorages) -> None:
        self.largest: int | None = None
        self._session = session
        self._saved = saved

    def contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """The `context_fn` of torch's checkpoint: contexts of the forward run and of the recomputation."""
        return nullcontext(), self._watch(self._session.stack.top.path)

    @contextmanager
    def _watch(self, path: str) -> Iterator[None]:
        recorder = self._session.recorder
        found: dict[int, int] = {}
        # Only the innermost pair of hooks is called, and the checkpoint's own pair fetches what it recomputes.
        pack, unpack = torch._C._autograd._top_saved_tensors_default_hooks(False)

        def counted(tensor: torch.Tensor) -> Any:
            self._saved.note(tensor, found)
            return pack(tensor)

        # torch sets function modes aside while a backward runs: without ours a direct fused attention would decompose.
        functions = FunctionObserver(self._session.attention, self._session.shadow)
        recorder.stage = "recompute"
        try:
            with self._session.stack.inside(path), functions, saved_tensors_hooks(counted, unpack):
                yield
        finally:
            recorder.stage = "backward"
            held = self._saved.bytes.keys()
            size = sum(count for storage, count in found.items() if storage not in held)
            self.largest = max(self.largest or 0, size)


def _enable_checkpointing(undo: ExitStack, model: nn.Module, recomputation: Recomputation) -> bool:
    """Let the model checkpoint its layers until `undo` closes; False when it cannot."""
    if not getattr(model, "supports_gradient_checkpointing", False):
        return False
    wrapped: Any = model
    settings = {"use_reentrant": False, "context_fn": recomputation.contexts}
    wrapped.activation_checkpointing_enable(settings)
    undo.callback(wrapped.activation_checkpointing_disable)
    return True


@contextmanager
def _training_mode(model: nn.Module) -> Iterator[None]:
    """Training mode for the time of the step; modes and gradients are as before afterwards."""
    modes = {module: module.training for module in model.modules()}
    gradients = {parameter: parameter.grad for parameter in model.parameters()}
    model.train()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
        for parameter, gradient in gradients.items():
            parameter.grad = gradient


def _loss(
    session: Session, model: nn.Module, run: RunShape, inputs: dict[str, Any] | None
) -> tuple[torch.Tensor, tuple[str, ...]]:
    """The loss of one forward run, and what was assumed to have one."""
    accepted = accepted_inputs(model)
    if inputs is not None:
        given = placed(session, inputs, model)
    else:
        given = {ids_name(accepted): token_ids(session, model, run.batch, run.seq)}
        if "labels" in accepted:
            given["labels"] = token_ids(session, model, run.batch, run.seq)
        if "use_cache" in accepted:
            given["use_cache"] = False
    output = run_on(model, given)
    loss = getattr(output, "loss", None)
    if loss is not None:
        return loss, ()
    outputs = output.values() if isinstance(output, Mapping) else (output,)
    differentiable = [tensor for tensor in tensors_in(outputs) if tensor.requires_grad]
    name = type(model).__name__
    if not differentiable:
        raise ValueError(f"{name} gives no output that depends on a trainable parameter: there is nothing to train")
    return differentiable[0].sum(), (f"{name} computes no loss: the sum of its first output stands for one",)


def _unchanged(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
