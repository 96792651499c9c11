"""What of a PEFT adapter would load into its base model: injected on meta by peft, filled by transformers' loader."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import WeightRenaming

from introspect.check_record import ExpectedTensor, Failure, LoadRecord, WrongShape
from introspect.checkpoint import Checkpoint
from introspect.errors import BuildError, CheckpointError, MissingPackageError
from introspect.hooks import loader
from introspect.hooks.build import build
from introspect.hooks.dtypes import dtype_name, torch_dtype
from introspect.hooks.loading import meta_tensor
from introspect.packed import parts_of
from introspect.sources import Source

ADAPTER = "default"  # the name peft gives an adapter that is given none
WRAPPED = "base_model.model."  # what peft puts before every name it saves


def compare_adapter(source: Source, checkpoint: Checkpoint) -> LoadRecord:
    """Load an adapter's headers into the model of `source`.

    Raises MissingPackageError without peft, BuildError or CheckpointError when the adapter does not fit the model.
    """
    built = build(source)
    model = built.module
    if not isinstance(model, PreTrainedModel):
        raise CheckpointError(
            checkpoint.source, "an adapter", f"its base must be a transformers model, not {source.id}"
        )
    mapping = loader.conversions(model, None)
    with _peft(), loader.quiet():
        mapping = _inject(model, checkpoint.adapter_config or {}, mapping, source)
    dtype = torch_dtype(built.dtype)
    parts = parts_of(checkpoint)
    loaded = loader.load(model, {name: meta_tensor(part, dtype) for name, part in parts.items()}, None, dtype, mapping)
    prefix = WRAPPED if any(name.startswith(WRAPPED) for name in parts) else ""
    stored = {landing.parameter: name for name, landing in loaded.landings.items()}
    return LoadRecord(
        model=built.identity,
        route="peft's injection and transformers' loader on the meta device",
        missing=tuple(
            ExpectedTensor(name=_saved_name(name, prefix), shape=tuple(tensor.shape), dtype=dtype_name(tensor.dtype))
            for name, tensor in loaded.before.items()
            if name in loaded.missing and f".{ADAPTER}." in f"{name}."
        ),
        unexpected=loaded.unexpected,
        wrong_shapes=tuple(
            WrongShape(name=stored[name], expected=tuple(loaded.before[name].shape), found=found)
            for name, found in loaded.mismatched.items()
            if name in stored
        ),
        failures=tuple(
            Failure(
                parameter=name, names=tuple(n for n, at in loaded.landings.items() if at.parameter == name), reason=why
            )
            for name, why in loaded.failed.items()
        ),
        dtype_named=False,  # adapters are trained in fp32 on bases of any dtype
        notes=(f"the base model is {source.text}",),
    )


def _inject(
    model: PreTrainedModel, adapter_config: dict[str, Any], mapping: loader.Conversions, source: Source
) -> loader.Conversions:
    """Put the adapter's modules into the model; the renamings from its file's names to them."""
    from peft import PeftConfig, inject_adapter_in_model
    from peft.utils.other import AuxiliaryTrainingWrapper
    from peft.utils.transformers_weight_conversion import build_peft_weight_mapping

    try:
        config = PeftConfig.from_peft_type(**adapter_config)
        if hasattr(config, "init_lora_weights"):
            config.init_lora_weights = True  # others compute a start from the base's weights
        conversions = build_peft_weight_mapping(mapping, ADAPTER, peft_config=config)
        with torch.device("meta"):
            inject_adapter_in_model(config, model, ADAPTER)
    except Exception as error:  # any line of peft may stumble over a config it did not write
        problem = f"peft cannot put this adapter into it: {type(error).__name__}: {' '.join(str(error).split())}"
        raise BuildError(source.id, problem, "give the base model that adapter_config.json names") from None
    for path, module in model.named_modules():
        if isinstance(module, AuxiliaryTrainingWrapper):
            for stored, held in module.adapter_state_dict_load_map(ADAPTER).items():
                conversions.append(WeightRenaming(f"{path}.{stored}", f"{path}.{held}"))
    return conversions


def _saved_name(parameter: str, prefix: str) -> str:
    return prefix + parameter.replace(f".{ADAPTER}", "")


@contextmanager
def _peft() -> Iterator[None]:
    """Keep peft's warnings off stderr; say what to install when it is not there."""
    try:
        import peft  # noqa: F401
    except ImportError:
        raise MissingPackageError("peft", "checking an adapter against its base model", "adapters") from None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
