"""The command of formats: published sizes, signs of the gain, and a format of the checkpoint's own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.tiny import build, record

import introspect
from introspect.errors import OptionError
from introspect.formats import load_formats

LLAMA = "meta-llama/Meta-Llama-3-8B"
MATRICES, PARAMETERS = 6_979_321_856, 8_030_261_248  # Llama-3-8B: all Linears of its layers, and everything


@pytest.fixture(scope="module")
def llama():
    return introspect.analyze("quant", LLAMA, context=2048, seq=2048)


def row(result, table, **wanted):
    (found,) = (r for r in result.tables[table].rows if all(r[name] == value for name, value in wanted.items()))
    return found


@pytest.mark.parametrize(
    ("format", "bits"), [("int4-g128", 4.25), ("awq-int4-g128", 4.15625), ("mxfp4", 4.25), ("bf16", 16)]
)
def test_published_sizes_of_llama_3_8b(llama, format, bits):
    expected = MATRICES * bits / 8 + 2 * (PARAMETERS - MATRICES)

    assert row(llama, "formats", format=format)["weight_bytes"] == expected


def test_columns_add_up(llama):
    for found in llama.tables["formats"].rows:
        parts = found["packed_bytes"] + found["scale_bytes"] + found["kept_bytes"]
        assert found["weight_bytes"] == parts
        assert found["params"] in (0, MATRICES)


def test_every_format_has_a_row(llama):
    assert [found["format"] for found in llama.tables["formats"].rows] == [*load_formats(), "native"]


def test_the_sign_of_the_gain_in_each_phase(llama):
    weight_only, w8a8 = row(llama, "gpus", format="int4-g128"), row(llama, "gpus", format="fp8-channel")

    assert weight_only["decode_gain"] > 2.5
    assert weight_only["prefill_gain"] == pytest.approx(1, abs=1e-3)  # computes in bf16
    assert 1.5 < w8a8["decode_gain"] < 2
    assert 1.5 < w8a8["prefill_gain"] < 2
    assert (weight_only["compute"], w8a8["compute"]) == ("bf16", "fp8")


def test_plain_weights_are_the_rooflines(llama):
    decode = introspect.analyze("roofline", LLAMA, phase="decode", context=2048).tables["gpus"].rows[0]

    assert row(llama, "gpus", format="bf16")["decode_seconds"] == pytest.approx(decode["seconds"])


def test_room_for_the_cache(llama):
    found = row(llama, "gpus", format="int4-g128")

    # 131,072 bytes a token in what 80 GB leave
    assert found["kv_tokens"] == (80_000_000_000 - row(llama, "formats", format="int4-g128")["weight_bytes"]) // 131_072
    assert (found["fits"], found["gpus_needed"]) == (True, 1)


def test_a_pattern_that_keeps_nothing_is_refused():
    with pytest.raises(OptionError) as error:
        introspect.analyze("quant", LLAMA, keep=("*o_proj*", "o_porj"))
    assert str(error.value) == (
        "--keep: got 'o_porj', expected a pattern of a parameter's path, as '*o_proj*'; quantised here are down_proj, "
        "gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj"
    )
    assert introspect.analyze("quant", LLAMA, keep="lm_head", only="nf4").tables  # named, though it stays high anyway


def test_the_price_of_keeping_o_and_down(llama):
    extra = {r["module"].rpartition(".")[2]: r["extra_bytes_if_kept"] for r in llama.tables["keep"].rows}

    # 32 matrices of 16 - 4.25 bits: 0.79 GB for o_proj, 2.76 GB for down_proj
    assert extra["o_proj"] == 32 * 4096 * 4096 * 11.75 / 8
    assert extra["down_proj"] == 32 * 4096 * 14336 * 11.75 / 8
    kept = introspect.analyze("quant", LLAMA, keep="*o_proj*", only=("int4-g128",))
    before = row(llama, "formats", format="int4-g128")["weight_bytes"]
    assert kept.tables["formats"].rows[0]["weight_bytes"] == before + extra["o_proj"]
    assert [r["kept"] for r in kept.tables["keep"].rows].count(True) == 1


def test_the_checkpoints_own_format():
    result = introspect.analyze("quant", "Qwen/Qwen3-8B-FP8", only=("native", "fp8-block128"), context=64, seq=64)
    native, built_in = result.tables["formats"].rows

    assert native["weight_bytes"] == built_in["weight_bytes"] == 9_437_399_040
    assert result.tables["gpus"].rows[0]["compute"] == "fp8"
    assert any("native: fp8, by modules of transformers' quantiser on meta" in note for note in result.notes)


def test_without_quantisation_native_is_plain(llama):
    assert row(llama, "formats", format="native")["weight_bytes"] == 2 * PARAMETERS


def changed(config, folder, **fields):
    """Path of a copy of a config with some fields changed."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(Path(config).read_text()) | fields))
    return str(path)


def test_a_native_format_that_is_not_known_is_null(tmp_path, tiny_config):
    path = changed(tiny_config, tmp_path, quantization_config={"quant_method": "aqlm"})
    result = introspect.analyze("quant", path, only="native", context=8, seq=8)

    assert result.tables["formats"].rows[0]["weight_bytes"] is None
    assert result.tables["gpus"].rows[0]["fits"] is None
    assert any("native: aqlm is not known: quant_method 'aqlm' has no layout" in note for note in result.notes)


def test_configs_in_fp32_are_compared_in_bf16(tmp_path, tiny_config):
    path = changed(tiny_config, tmp_path, dtype="float32")
    result = introspect.analyze("quant", path, only=("bf16", "native"), context=8, seq=8)
    plain, native = result.tables["formats"].rows

    assert native["weight_bytes"] == 2 * plain["weight_bytes"]
    assert (plain["ratio_to_bf16"], native["ratio_to_bf16"]) == (1, 2)
    assert [found["compute"] for found in result.tables["gpus"].rows] == ["bf16", "fp32"]
    assert any("the config's dtype is fp32" in line for line in result.assumptions)


def test_a_native_format_keeps_the_configs_dtype_for_what_it_does_not_quantise(tmp_path, tiny_config):
    """As LlamaForCausalLM-bitsandbytes-1's index, whose 1,050,939,392 kept weights of 8,030,261,248 are in fp32."""
    eight = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    for dtype, width in (("float32", 4), ("bfloat16", 2)):
        path = changed(tiny_config, tmp_path, dtype=dtype, quantization_config=eight)
        (found,) = introspect.analyze("quant", path, only="native", context=8, seq=8).tables["formats"].rows
        total = introspect.analyze("params", path).totals["total"]

        assert found["params"] > 0
        assert found["kept_bytes"] == width * (total - found["params"])


def test_what_was_asked_in_fp32_is_held_to_bf16_all_the_same(tiny_config):
    sixteen, asked = (
        introspect.analyze("quant", tiny_config, only=("bf16", "nf4", "native"), context=8, seq=8, dtype=dtype)
        for dtype in (None, "fp32")
    )
    plain, nf4, native = asked.tables["formats"].rows
    kept = row(sixteen, "formats", format="nf4")["kept_bytes"]

    assert plain["weight_bytes"] == native["weight_bytes"] == row(sixteen, "formats", format="bf16")["weight_bytes"]
    assert nf4["weight_bytes"] == row(sixteen, "formats", format="nf4")["weight_bytes"] + kept  # 4 bytes each, not 2
    assert nf4["ratio_to_bf16"] == nf4["weight_bytes"] / plain["weight_bytes"]
    assert asked.tables["gpus"].rows[0]["decode_gain"] == 1


def test_a_stored_record_in_fp32_has_no_16_bit_yardstick():
    stored = record(build("Llama"), phase="decode", context=8)  # built in fp32
    plain, nf4 = introspect.analyze("quant", stored, context=8, only=("bf16", "nf4")).tables["formats"].rows

    assert (plain["weight_bytes"], nf4["ratio_to_bf16"]) == (None, None)
    assert nf4["weight_bytes"] > 0


def test_a_smaller_cache_type_leaves_more_room(llama):
    eight = introspect.analyze("quant", LLAMA, only="bf16", kv_dtype="fp8", context=2048)
    before, after = row(llama, "gpus", format="bf16"), eight.tables["gpus"].rows[0]

    assert after["kv_tokens"] == pytest.approx(2 * before["kv_tokens"], abs=2)
    assert after["decode_seconds"] < before["decode_seconds"]


def test_one_stored_record_answers_for_its_own_phase():
    result = introspect.analyze("quant", record(build("Llama"), phase="decode", context=8), context=8, only="int4-g128")
    (found,) = result.tables["gpus"].rows

    assert found["decode_seconds"] > 0
    assert found["prefill_seconds"] is None


def test_unknown_formats_name_the_near_ones(tiny_config):
    with pytest.raises(OptionError, match="did you mean nf4"):
        introspect.analyze("quant", tiny_config, only="nf5")


def test_recipes_are_listed(llama):
    recipes = {r["recipe"]: r for r in llama.tables["recipes"].rows}

    assert recipes["SmoothQuant"]["products"] == "int8 x int8, summed in int32"
    assert "16 bits" in recipes["LLM.int8()"]["activations"]
