import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.sources import LLAMA

from introspect.errors import ConfigError
from introspect.sizes import bound_of, check_sizes


def refusal(**changes):
    with pytest.raises(ConfigError) as caught:
        check_sizes("tiny.json", LLAMA | changes)
    return str(caught.value)


def test_a_plain_config_passes():
    check_sizes("tiny.json", LLAMA)


@pytest.mark.parametrize("value", [0, -1, 4096.0, "4096", True, 10**12, [64, -1]])
def test_an_impossible_size_names_field_value_and_bound(value):
    assert refusal(hidden_size=value) == (
        f"tiny.json: config field 'hidden_size' is {value!r}, expected a whole number from 1 to 268435456"
    )


def test_layers_by_the_million_are_refused_before_any_is_built():
    assert refusal(num_hidden_layers=10**12) == (
        "tiny.json: config field 'num_hidden_layers' is 1000000000000, expected a whole number from 1 to 10000"
    )


def test_experts_heads_and_tables_have_bounds_of_their_own():
    assert "from 0 to 100000" in refusal(num_experts=10**6)
    assert "from 1 to 100000" in refusal(num_attention_heads=10**6)
    assert "from 0 to 268435456" in refusal(intermediate_size=10**10)
    assert "from 1 to 268435456" in refusal(max_position_embeddings=-5)


def test_parts_are_checked_and_named():
    assert "config field 'text_config.vocab_size' is 0" in refusal(text_config={"vocab_size": 0})
    assert "config field 'vision_config.a_config.num_layers' is 0" in refusal(
        vision_config={"a_config": {"num_layers": 0}}
    )


def test_a_part_is_an_object():
    assert refusal(text_config=[1]) == (
        "tiny.json: config field 'text_config' is [1], expected an object, the config of the text model"
    )


def test_key_value_heads_divide_query_heads():
    assert refusal(num_attention_heads=32, num_key_value_heads=5) == (
        "tiny.json: config field 'num_key_value_heads' is 5, expected a divisor of num_attention_heads (32)"
    )


@pytest.mark.parametrize("name", ["num_experts", "num_local_experts", "n_routed_experts"])
def test_no_more_experts_are_chosen_than_there_are(name):
    assert refusal(**{name: 4, "num_experts_per_tok": 8}) == (
        f"tiny.json: config field 'num_experts_per_tok' is 8, expected at most {name} (4)"
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"head_dim": None},  # the class's default
        {"num_experts": 0, "num_experts_per_tok": 2},  # a dense model of a sparse class
        {"n_shared_experts": 0},
        {"intermediate_size": [128, 256]},  # by layer
        {"attention_layers": ["global", "local"]},  # the kind of each layer
        {"moe_layers": {"0": 1}},
        {"audio_chunk_size": -1, "window_size": -1},  # no chunk, no window
        {"share_heads": True},
        {"is_llama_config": True},
        {"quantization_config": {"group_size": -1}},  # one group a row
        {"rope_theta": 1e6, "rms_norm_eps": 1e-5, "mlp_ratio": 2.5},
    ],
)
def test_what_only_looks_odd_passes(changes):
    check_sizes("tiny.json", LLAMA | changes)


@given(st.integers(), st.sampled_from(["hidden_size", "num_hidden_layers", "intermediate_size", "num_experts"]))
def test_exactly_the_sizes_within_the_stated_bounds_pass(size, name):
    least = 1 if name in {"hidden_size", "num_hidden_layers"} else 0
    if least <= size <= bound_of(name):
        check_sizes("tiny.json", LLAMA | {name: size})
    else:
        with pytest.raises(ConfigError, match=name):
            check_sizes("tiny.json", LLAMA | {name: size})
