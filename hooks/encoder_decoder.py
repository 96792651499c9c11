"""Models with an encoder and a decoder that both read token ids (T5, BART): what a step of them is.

A prefill encodes `seq` ids and gives the decoder as many. A step on a cache gives the decoder the new ids alone; the
encoder read as many ids as are cached, before the step. Both lengths are assumed to be equal, and said to be.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutput

from introspect.errors import OptionError
from introspect.records import RunShape

ENCODED = "an encoder-decoder: {} tokens a sequence went through its encoder{}, as many as its decoder {}"


def reads_two(model: nn.Module, accepted: set[str]) -> bool:
    """Whether the forward takes ids for an encoder and for a decoder. OptionError for an encoder that reads no ids."""
    if not getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return False
    if "input_ids" not in accepted:
        read = getattr(model, "main_input_name", "something else")
        raise OptionError(
            "inputs",
            "none",
            f"those of {type(model).__name__}: its encoder reads {read}, no token ids "
            "(introspect.trace(model, inputs), or a factory that returns both)",
        )
    return "decoder_input_ids" in accepted


def encoder_tokens(run: RunShape) -> int:
    """Tokens a sequence that the encoder reads: as many as the decoder holds before the step, or is given in it."""
    return run.context or run.seq


def two_inputs(encoder_ids: torch.Tensor, decoder_ids: torch.Tensor, encoded: torch.Tensor | None) -> dict[str, Any]:
    """The forward's inputs; `encoded`: what the encoder gave in an earlier step."""
    if encoded is None:
        return {"input_ids": encoder_ids, "decoder_input_ids": decoder_ids}
    return {"encoder_outputs": BaseModelOutput(last_hidden_state=encoded), "decoder_input_ids": decoder_ids}


def assumption(run: RunShape, *, cached: bool) -> str:
    """What a step took for granted about the lengths."""
    when, has = (" before the step", "holds") if cached else ("", "reads")
    return ENCODED.format(f"{encoder_tokens(run):,}", when, has)
