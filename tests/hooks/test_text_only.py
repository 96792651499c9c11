from __future__ import annotations

import torch
import transformers
from accelerate import init_empty_weights
from support.tiny import LLAMA, record


def test_a_vision_wrapper_runs_on_text_alone_and_its_towers_are_counted():
    config = transformers.Llama4Config(
        text_config={**LLAMA, "head_dim": 16, "intermediate_size_mlp": 160, "num_local_experts": 4, "pad_token_id": 0},
        vision_config={"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64},
    )
    with init_empty_weights(include_buffers=True):
        model = transformers.Llama4ForConditionalGeneration(config).to(torch.float32).eval()
    trace = record(model, seq=8)

    untouched = {p.path.split(".")[0] for p in trace.parameters if not (p.touched or p.buffer)}
    assert untouched == {"vision_model", "multi_modal_projector"}
    assert not any(module._forward_hooks for module in model.modules())
