"""Laws that hold for whatever a command answers, asked of every command there is."""

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import introspect
from introspect.cli import main
from introspect.commands import command_names, load_command
from introspect.render import FORMATS, render
from introspect.units import unit_of

OPTIONS = {
    "check": {"files_only": True},
    "lora": {"rank": 1, "seq": 16},
    "speculate": {"alpha": 0.7},
    "train": {"seq": 16},
}
"""What a command needs besides its models."""


@pytest.fixture(scope="module", params=command_names())
def question(request, tiny_config, tmp_path_factory):
    """A command, models and options that it answers."""
    name = request.param
    if name == "check":
        path = tmp_path_factory.mktemp("checkpoint") / "model.safetensors"
        save_file({"weight": torch.zeros(2, 3)}, path)
        return name, [str(path)], OPTIONS[name]
    if name == "moe":
        path = tmp_path_factory.mktemp("experts") / "config.json"
        sizes = json.loads(Path(tiny_config).read_text()) | {"model_type": "mixtral", "num_local_experts": 4}
        path.write_text(json.dumps({**sizes, "architectures": ["MixtralForCausalLM"]}))
        return name, [str(path)], {}
    models = {"none": 0, "one": 1, "two": 2, "many": 1}[load_command(name).models]
    return name, [tiny_config] * models, OPTIONS.get(name, {})


@pytest.fixture(scope="module")
def result(question):
    """What Python gets."""
    name, models, options = question
    model = models[0] if len(models) == 1 else models or None
    return introspect.analyze(name, model, **options)


@pytest.fixture(scope="module")
def answer(result):
    """The same as JSON."""
    return json.loads(render([result], "json"))


def numbers(answer):
    values = [
        *answer["totals"].values(),
        *(value for table in tables(answer) for row in table["rows"] for value in row.values()),
    ]
    return [value for value in values if isinstance(value, float)]


def tables(answer):
    return answer["tables"].values()


def test_the_envelope_is_the_contracts(answer, question):
    keys = [
        "introspect",
        "schema",
        "command",
        "model",
        "run",
        "totals",
        "tables",
        "assumptions",
        "notes",
        "unclassified",
    ]

    assert list(answer) == keys
    assert answer["command"] == question[0]
    assert answer["tables"] or answer["totals"]


def test_units_are_declared_as_names_carry_them(answer):
    for table in tables(answer):
        for column, unit in table["units"].items():
            assert unit == unit_of(column) or not unit_of(column), column


def test_every_figure_is_finite(answer):
    assert all(math.isfinite(value) for value in numbers(answer))


def test_shares_lie_between_nothing_and_all(answer):
    for table in tables(answer):
        for column in table["units"]:
            shares = [row[column] for row in table["rows"] if unit_of(column) == "share" and row[column] is not None]
            assert all(0 <= share <= 1 + 1e-9 for share in shares), column


def test_the_command_line_asked_after_python_says_the_same(answer, question, capsys):
    name, models, options = question
    words = []
    for key, value in options.items():
        words += [f"--{key.replace('_', '-')}", *([] if value is True else [str(value)])]
    main([name, *models, *words, "--format", "json"])
    out, err = capsys.readouterr()

    assert json.loads(out) == answer
    assert err == ""


@pytest.mark.parametrize("width", [None, 72, 200])
def test_every_form_shows_every_table(result, width):
    for form in FORMATS:
        text = render([result], form, width=width)
        assert all(name in text for name, table in result.tables.items() if table.rows)


def test_the_readme_names_it(question):
    readme = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")

    assert f"  {question[0]} " in readme
