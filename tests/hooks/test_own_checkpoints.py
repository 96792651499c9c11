"""A checkpoint cut and named as a model's own conversions would save it is clean, for every built-in config."""

import copy
from dataclasses import replace

import pytest
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.initialization import no_tie_weights

from introspect.catalog import entries
from introspect.checkpoint import Checkpoint
from introspect.errors import BuildError, UnknownArchitectureError
from introspect.hooks.build import build
from introspect.hooks.dtypes import dtype_name
from introspect.hooks.loading import compare
from introspect.safetensors_header import SHORT_NAMES, Header, StoredTensor
from introspect.sources import resolve

STORED_NAMES = {short: name for name, short in SHORT_NAMES.items()}
ALWAYS = ("meta-llama/Meta-Llama-3-8B", "mistralai/Mixtral-8x7B-v0.1", "google/gemma-2-2b", "openai/gpt-oss-20b")


def unquantised(source):
    """The same model without its quantiser, whose parts are tested elsewhere."""
    config = copy.deepcopy(source.config)
    for part in (config, config.get("text_config", {})):
        part.pop("quantization_config", None)
    return replace(source, config=config)


def own_checkpoint(source):
    """The headers that save_pretrained would write: no tied parameter twice, conversions reverted."""
    with no_tie_weights():
        model = build(source).module
    assert isinstance(model, PreTrainedModel)
    state = {name: t for name, t in model.state_dict().items() if name not in model.all_tied_weights_keys}
    tensors = tuple(
        StoredTensor(name, STORED_NAMES[dtype_name(tensor.dtype)], tuple(tensor.shape), 0, 0)
        for name, tensor in revert_weight_conversion(model, state).items()
    )
    header = Header(file="own", file_bytes=None, data_start=8, tensors=tensors, metadata=None, faults=())
    return Checkpoint(source="own", kind="file", headers=(header,))


def check(model):
    source = unquantised(resolve(model))
    try:
        checkpoint = own_checkpoint(source)
    except (UnknownArchitectureError, BuildError):
        pytest.skip("the installed transformers cannot build this config")
    record = compare(source, checkpoint)

    assert record.fits, (record.missing[:3], record.unexpected[:3], record.wrong_shapes[:3], record.failures[:3])
    assert record.wrong_dtypes == ()


@pytest.mark.parametrize("model", ALWAYS)
def test_its_own_checkpoint_is_clean(model):
    check(model)


@pytest.mark.sweep
@pytest.mark.parametrize("model", [entry.id for entry in entries() if entry.id not in ALWAYS])
def test_every_models_own_checkpoint_is_clean(model):
    check(model)
