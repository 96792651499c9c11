"""Tensors of small quantised checkpoints, each layout written down here a second time, from its own definition."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Parts = dict[str, torch.Tensor]
WIDTH, INNER, KV, VOCABULARY, GROUP = 256, 512, 128, 512, 128


def _zeros(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def gptq(n: int, k: int, bits: int = 4) -> Parts:
    """qweight packs 32/bits rows of the turned matrix into one int32."""
    return {
        "qweight": _zeros(k * bits // 32, n, dtype=torch.int32),
        "qzeros": _zeros(k // GROUP, n * bits // 32, dtype=torch.int32),
        "scales": _zeros(k // GROUP, n),
        "g_idx": _zeros(k, dtype=torch.int32),
    }


def awq(n: int, k: int, bits: int = 4) -> Parts:
    """qweight packs 32/bits columns of the turned matrix."""
    return {
        "qweight": _zeros(k, n * bits // 32, dtype=torch.int32),
        "qzeros": _zeros(k // GROUP, n * bits // 32, dtype=torch.int32),
        "scales": _zeros(k // GROUP, n),
    }


def bnb4(n: int, k: int) -> Parts:
    """Two values a byte, an absmax for 64 of them, those quantised again in blocks of 256."""
    absmax = n * k // 64
    return {
        "weight": _zeros(n * k // 2, 1, dtype=torch.uint8),
        "weight.absmax": _zeros(absmax, dtype=torch.uint8),
        "weight.quant_map": _zeros(16, dtype=torch.float32),
        "weight.nested_absmax": _zeros(-(-absmax // 256), dtype=torch.float32),
        "weight.nested_quant_map": _zeros(256, dtype=torch.float32),
        "weight.quant_state.bitsandbytes__nf4": _zeros(90, dtype=torch.uint8),
    }


def bnb8(n: int, k: int) -> Parts:
    """One scale a row."""
    return {
        "weight": _zeros(n, k, dtype=torch.int8),
        "SCB": _zeros(n, dtype=torch.float32),
        "weight_format": torch.zeros((), dtype=torch.uint8),
    }


def compressed(n: int, k: int, bits: int = 4) -> Parts:
    """compressed-tensors, symmetric: 32/bits columns in one int32."""
    return {
        "weight_packed": _zeros(n, k * bits // 32, dtype=torch.int32),
        "weight_scale": _zeros(n, k // GROUP, dtype=torch.bfloat16),
        "weight_shape": torch.tensor([n, k]),
    }


def fp8(n: int, k: int) -> Parts:
    """Blocks of 128 x 128."""
    return {
        "weight": _zeros(n, k, dtype=torch.float8_e4m3fn),
        "weight_scale_inv": torch.ones(-(-n // 128), -(-k // 128)),
    }


_COMPRESSED_WEIGHTS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP, "symmetric": True}
METHODS: dict[str, tuple[Callable[[int, int], Parts], dict[str, Any]]] = {
    "gptq": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False}),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}),
    "bnb4": (bnb4, {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}),
    "bnb8": (bnb8, {"quant_method": "bitsandbytes", "load_in_8bit": True}),
    "fp8": (fp8, {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}),
    "compressed": (
        compressed,
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "quantization_status": "compressed",
            "ignore": ["lm_head", "re:.*gate$"],
            "config_groups": {
                "group_0": {"targets": ["Linear"], "weights": _COMPRESSED_WEIGHTS, "format": "pack-quantized"}
            },
        },
    ),
}


def config(method: str, architecture: str = "llama") -> dict[str, Any]:
    """The config of a one-layer model whose matrices are quantised so. `architecture`: llama or mixtral."""
    return {
        "model_type": architecture,
        "architectures": [f"{architecture.capitalize()}ForCausalLM"],
        "hidden_size": WIDTH,
        "intermediate_size": INNER,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_local_experts": 2,
        "vocab_size": VOCABULARY,
        "dtype": "bfloat16" if method in ("fp8", "compressed") else "float16",
        "tie_word_embeddings": False,
        "quantization_config": METHODS[method][1],
    }


def tensors(method: str, architecture: str = "llama") -> Parts:
    """All tensors of such a checkpoint, as the file would hold them."""
    pack = METHODS[method][0]
    dtype = torch.bfloat16 if method in ("fp8", "compressed") else torch.float16
    plain = {"model.embed_tokens": (VOCABULARY, WIDTH), "lm_head": (VOCABULARY, WIDTH), "model.norm": (WIDTH,)}
    layer = "model.layers.0"
    plain |= {f"{layer}.input_layernorm": (WIDTH,), f"{layer}.post_attention_layernorm": (WIDTH,)}
    packed = {f"{layer}.self_attn.{name}_proj": (KV if name in "kv" else WIDTH, WIDTH) for name in "qkvo"}
    if architecture == "llama":
        packed |= {f"{layer}.mlp.{name}_proj": (INNER, WIDTH) for name in ("gate", "up")}
        packed[f"{layer}.mlp.down_proj"] = (WIDTH, INNER)
    else:
        plain[f"{layer}.block_sparse_moe.gate"] = (2, WIDTH)
        for expert in (f"{layer}.block_sparse_moe.experts.{number}" for number in range(2)):
            packed |= {f"{expert}.w1": (INNER, WIDTH), f"{expert}.w3": (INNER, WIDTH), f"{expert}.w2": (WIDTH, INNER)}
    state = {f"{name}.weight": _zeros(*shape, dtype=dtype) for name, shape in plain.items()}
    return state | {f"{name}.{part}": t for name, shape in packed.items() for part, t in pack(*shape).items()}
