from dataclasses import replace

import pytest
from support.small_trace import small_trace

import introspect
from introspect.api import answer
from introspect.commands import load_command
from introspect.errors import GivenInputsError, OptionError, TraceShapeError, UnknownNameError

pytestmark = pytest.mark.usefixtures("demo_commands")


def test_a_stored_trace_answers_without_repeating_its_run():
    result = introspect.analyze("demo", small_trace())

    # linear [2, 4] x [4, 8] once, then 2 in a Repeat of 3: 7 times 2*2*4*8 FLOPs
    assert result.totals == {"total_flops": 7 * 128, "products": 2}
    assert result.run["phase"] == "decode"
    assert result.run["context"] == 16


def test_a_stored_trace_asked_for_another_run_is_refused():
    with pytest.raises(TraceShapeError, match=r"context 16\) and cannot answer for another \(context 17\)"):
        introspect.analyze("demo", small_trace(), context=17)


def test_what_was_decided_while_a_model_was_built_is_said_once():
    trace = small_trace()
    noted = replace(trace, model=replace(trace.model, notes=("built as another class",)))

    assert introspect.analyze("demo", trace).notes == ()
    assert introspect.analyze("demo", noted).notes == ("built as another class",)


def test_a_saved_trace_is_a_model(tmp_path):
    path = tmp_path / "saved.json"
    introspect.save_trace(small_trace(), path)

    assert introspect.load_trace(path) == small_trace()
    assert introspect.analyze("demo", path) == introspect.analyze("demo", small_trace())


def test_options_are_the_command_lines_with_underscores():
    result = introspect.analyze("demo", small_trace(), keep="lm_head", sizes=[3, 4], mode="slow", no_cache=True)

    assert result.assumptions == ("mode slow", "lm_head", "3", "4")


def test_unknown_and_wrong_options_are_named_as_python_spells_them():
    with pytest.raises(UnknownNameError, match=r"unknown option of demo sizs; did you mean sizes\?"):
        introspect.analyze("demo", small_trace(), sizs=3)
    with pytest.raises(OptionError, match=r"^sizes: got 0, expected an integer at least 1"):
        introspect.analyze("demo", small_trace(), sizes=0)
    with pytest.raises(UnknownNameError, match="unknown command dem"):
        introspect.analyze("dem", small_trace())
    with pytest.raises(UnknownNameError, match="unknown option of gpus offline"):
        introspect.analyze("gpus", offline=True)


@pytest.mark.parametrize(
    ("command", "model", "message"),
    [
        ("demo", None, "MODEL: got 0, expected one model for demo"),
        ("demo", ["a", "b"], "MODEL: got 2, expected one model for demo"),
        ("gpus", "a", "MODEL: got 1, expected no model for gpus"),
        ("pair", None, "MODEL: got 0, expected one or more models for pair"),
    ],
)
def test_the_number_of_models_is_checked(command, model, message):
    with pytest.raises(OptionError) as caught:
        introspect.analyze(command, model)
    assert str(caught.value) == message


def test_several_models_give_several_results():
    first, second = introspect.analyze("pair", [small_trace(), small_trace()])

    assert first == second
    assert first.totals == {"params": 32}  # 8 x 4
    assert introspect.analyze("pair", [small_trace()]).totals == {"params": 32}


def test_a_command_that_finds_its_model_itself_takes_it_as_an_option():
    assert introspect.analyze("crash", "a/b", how="note").notes == ("a/b",)
    assert introspect.analyze("crash", how="note").notes == ("None",)


def test_doubts_are_what_was_assumed_or_unknown():
    assert answer(load_command("demo"), [small_trace()], {}).doubts == ()
    assert answer(load_command("demo"), [small_trace(doubtful=True)], {}).doubts == (
        "unclassified op aten.odd in layers.0 (3)",
        "assumed Tensor.any = False at model.py:7",
    )


@pytest.mark.parametrize("options", [{"batch": 0}, {"phase": "x"}, {"seq": -1}, {"context": -1}])
def test_trace_checks_its_run_before_it_looks_for_the_model(options):
    (name,) = options
    with pytest.raises(OptionError, match=f"^{name}: got "):
        introspect.trace("no/such-model", **options)


def test_trace_of_a_real_config_is_the_same_from_every_spelling(tmp_path):
    from transformers import LlamaConfig

    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=50,
        dtype="bfloat16",
    )
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path)
    records = [introspect.trace(model, seq=8) for model in (config, tmp_path, tmp_path / "config.json")]

    assert len({tuple(record.ops) for record in records}) == 1
    assert [record.run.seq for record in records] == [8, 8, 8]
    # embedding and head 50 x 32; per layer 4 of 32 x 32, 3 of 32 x 64, 2 norms of 32; the last norm
    assert sum(parameter.count for parameter in records[0].parameters if not parameter.buffer) == (
        2 * 50 * 32 + 2 * (4 * 32 * 32 + 3 * 32 * 64 + 2 * 32) + 32
    )


def test_trace_of_a_plain_module_takes_its_inputs():
    import torch

    x = torch.zeros(2, 4)
    for record in (
        introspect.trace(torch.nn.Linear(4, 8), x),
        introspect.trace(torch.nn.Linear(4, 8), (x,)),
        introspect.trace(torch.nn.Linear(4, 8), inputs={"input": x}),
    ):
        (gemm,) = [gemm for op, _ in record.walk() for gemm in op.gemms]
        assert (gemm.m, gemm.k, gemm.n) == (2, 4, 8)
        assert (record.run.batch, record.run.seq, record.run.context) == (2, 1, 0)


def test_a_module_and_its_inputs_answer_what_needs_one_step():
    import torch

    net = torch.nn.Sequential(torch.nn.Embedding(50, 8), torch.nn.Linear(8, 8), torch.nn.Linear(8, 50))
    ids = torch.zeros((2, 6), dtype=torch.int64)

    for command in ("trace", "params", "audit", "roofline", "quant"):
        result = introspect.analyze(command, net, inputs=ids)
        assert (result.run["batch"], result.run["seq"]) == (2, 6)
    # 8x8 and 8x50 with biases, the table 50x8; 2 x N x 12 tokens
    assert "2NT = 2 x 922 x 12 tokens = 22,128 FLOPs" in introspect.analyze("trace", net, ids).notes[1]
    assert introspect.analyze("trace", net, ids, dtype="bf16").run["dtype"] == "bf16"


@pytest.mark.parametrize(
    ("command", "options", "own", "asked"),
    [
        ("trace", {"batch": 3}, "batch 2", "batch 3"),
        ("trace", {"phase": "decode"}, "seq 6, context 0", "seq 1, context 2048"),
        ("kv", {}, "batch 2, seq 6, context 0", "batch 1, seq 1, context 2048"),
    ],
)
def test_another_step_than_the_inputs_is_refused(command, options, own, asked):
    import torch

    with pytest.raises(GivenInputsError) as caught:
        introspect.analyze(command, torch.nn.Embedding(50, 8), torch.zeros((2, 6), dtype=torch.int64), **options)
    assert str(caught.value).startswith(
        f"Embedding: its inputs are one step ({own}) and cannot answer for another ({asked}); give inputs of that step"
    )


def test_inputs_belong_to_one_model_that_can_be_run():
    with pytest.raises(OptionError, match="inputs: got 'dict', expected none beside a stored trace"):
        introspect.analyze("demo", small_trace(), inputs={})
    with pytest.raises(OptionError, match="inputs: got 'dict', expected one model that they are for, not 2"):
        introspect.analyze("pair", [small_trace(), small_trace()], inputs={})
