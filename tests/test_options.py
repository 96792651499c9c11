from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from introspect.errors import OptionError, UnknownNameError
from introspect.options import build, options_of, parse
from introspect.params import GpuParams, RunParams, option


@dataclass(frozen=True, slots=True, kw_only=True)
class Params(RunParams, GpuParams):
    kv_dtype: Literal["bf16", "fp8"] = option("bf16", "cache dtype")
    page: int | None = option(None, "tokens a page")
    file: str = option("", "a file")
    verbose: bool = option(False, "say more")
    lengths: tuple[int, ...] = option((1,), "lengths", at_least=0)


OPTIONS = {each.name: each for each in options_of(Params)}


def test_fields_become_options_with_kind_choices_and_bounds():
    batch, gpu, kv_dtype, page = (OPTIONS[name] for name in ("batch", "gpu", "kv_dtype", "page"))

    assert (batch.flag, batch.kind, batch.at_least, batch.short) == ("--batch", int, 1, "b")
    assert (gpu.kind, gpu.repeatable, gpu.default) == (str, True, ("h100-sxm",))
    assert (kv_dtype.flag, kv_dtype.choices) == ("--kv-dtype", ("bf16", "fp8"))
    assert (page.kind, page.at_least) == (int, 1)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("8192", 8192),
        ("1_000_000", 1_000_000),
        ("128k", 131072),  # 128 x 1024
        ("0.5k", 512),
        ("15e12", 15 * 10**12),
        ("15T", 15 * 10**12),
        ("7B", 7 * 10**9),
        ("1.5M", 1_500_000),
        ("-3", -3),  # read here, refused by the bound
    ],
)
def test_integers_may_be_written_short(text, value):
    assert parse(OPTIONS["batch"], text) == value


@given(st.integers(min_value=-(10**25), max_value=10**25))
def test_plain_integers_are_read_exactly(value):
    assert parse(OPTIONS["batch"], str(value)) == value


def test_python_may_write_an_integer_as_the_command_line_does():
    assert build(RunParams, {"batch": 1e3}).batch == 1000
    assert isinstance(build(RunParams, {"batch": 1e3}).batch, int)


@pytest.mark.parametrize("text", ["", "k", "1.5", "0.3k", "abc", "nan", "inf", "1e999999999", "8 192x", "0x10"])
def test_what_is_no_whole_number_is_refused(text):
    with pytest.raises(
        OptionError, match=r"--batch: got '.*', expected an integer at least 1 and at most 1,000,000,000"
    ):
        parse(OPTIONS["batch"], text)


@pytest.mark.parametrize(
    ("given_options", "message"),
    [
        ({"batch": 0}, "batch: got 0, expected an integer at least 1 and at most 1,000,000,000"),
        ({"batch": -4}, "batch: got -4, expected an integer at least 1 and at most 1,000,000,000"),
        ({"batch": 1.5}, "batch: got 1.5, expected an integer at least 1 and at most 1,000,000,000"),
        ({"batch": True}, "batch: got True, expected an integer at least 1 and at most 1,000,000,000"),
        ({"batch": None}, "batch: got None, expected an integer at least 1 and at most 1,000,000,000"),
        ({"context": -1}, "context: got -1, expected an integer at least 0 and at most 16,777,216"),
        ({"mfu": 0}, "mfu: got 0, expected a number above 0 and at most 1"),
        ({"mfu": 1.01}, "mfu: got 1.01, expected a number above 0 and at most 1"),
        ({"mfu": float("nan")}, "mfu: got nan, expected a number above 0 and at most 1"),
        ({"mfu": "high"}, "mfu: got 'high', expected a number above 0 and at most 1"),
        ({"phase": "decod"}, "phase: got 'decod', expected prefill, decode or train; did you mean decode?"),
        ({"kv_dtype": "x"}, "kv_dtype: got 'x', expected bf16 or fp8"),
        ({"verbose": 1}, "verbose: got 1, expected true or false"),
        ({"file": 3}, "file: got 3, expected text"),
        ({"lengths": (8, -8)}, "lengths: got -8, expected an integer at least 0"),
    ],
)
def test_a_wrong_value_is_named_with_what_is_expected(given_options, message):
    with pytest.raises(OptionError) as caught:
        build(Params, given_options)
    assert str(caught.value) == message


def test_messages_spell_options_as_the_caller_does():
    with pytest.raises(OptionError, match=r"^--kv-dtype: got 'x'"):
        build(Params, {"kv_dtype": "x"}, flags=True)
    with pytest.raises(UnknownNameError, match=r"unknown option kv_dtyp; did you mean kv_dtype or dtype\?"):
        build(Params, {"kv_dtyp": "x"})


def test_values_take_the_types_of_their_fields():
    params = build(Params, {"gpu": "h200", "lengths": [1, 2], "mfu": 1, "file": Path("a/b"), "context": None})

    assert params.gpu == ("h200",)
    assert params.lengths == (1, 2)
    assert isinstance(params.mfu, float)
    assert params.file == "a/b"
    assert params.context is None


def test_decode_has_one_new_token_and_a_default_context():
    assert build(RunParams, {"phase": "decode"}).run_shape().seq == 1
    assert build(RunParams, {"phase": "decode"}).run_shape().context == 2048
    assert build(RunParams, {}).run_shape().context == 0


def test_a_training_step_has_no_cached_tokens():
    with pytest.raises(OptionError, match="--context: got 5, expected none with --phase train"):
        build(RunParams, {"phase": "train", "context": 5}).run_shape()


def test_a_type_no_option_can_have_is_our_own_mistake():
    @dataclass
    class Odd:
        where: complex = option(1j, "no option")

    with pytest.raises(TypeError, match="an option cannot be a <class 'complex'>"):
        options_of(Odd)
