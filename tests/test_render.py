import csv
import io
import json

import pytest

from introspect.errors import UnknownNameError
from introspect.render import FORMATS, render
from introspect.table import Result, Table

RESULT = Result(
    command="kv",
    model={"id": "a/b", "class": "BModel", "source": "built-in catalog", "config_sha256": "0" * 64},
    run={"phase": "decode", "batch": 2, "seq": 1, "context": 16, "dtype": "bf16", "tp": None},
    totals={"bytes_per_token": 131072, "layers": 32, "seconds": None},
    tables={
        "layers": Table(
            units={"kind": "", "bytes": "B", "share": "share", "shape": "", "fits": "", "window": ""},
            rows=(
                {"kind": "full|GQA", "bytes": 4096, "share": 0.25, "shape": [8, 128], "fits": True, "window": None},
                {"kind": "sliding", "bytes": 12288, "share": 0.75, "shape": [8, 64], "fits": False, "window": 4096},
            ),
        ),
        "empty": Table(units={"a": ""}, rows=()),
    },
    assumptions=("a page holds 16 tokens",),
    notes=("one row is read",),
    unclassified=("aten.odd x 3",),
)


def test_all_formats_of_one_result():
    """The four renderings side by side: the same facts in each."""
    table, markdown, csv_text, json_text = (render([RESULT], form) for form in FORMATS)

    assert table == (
        "introspect kv a/b (BModel)\n"
        "config: built-in catalog\n"
        "run: phase decode, batch 2, seq 1, context 16, dtype bf16\n"
        "\n"
        "totals\n"
        "total               value    exact\n"
        "---------------  --------  -------\n"
        "bytes_per_token  131.1 kB  131,072\n"
        "layers                 32\n"
        "seconds                 -\n"
        "\n"
        "layers\n"
        "kind         bytes    share  shape    fits      window\n"
        "--------  --------  -------  -------  ------  --------\n"
        "full|GQA  4.096 kB     25 %  8 x 128  yes            -\n"
        "sliding   12.29 kB     75 %  8 x 64   no         4,096\n"
        "\n"
        "assumptions\n- a page holds 16 tokens\n"
        "\n"
        "notes\n- one row is read\n"
        "\n"
        "unclassified\n- aten.odd x 3\n"
    )
    assert "## introspect kv a/b (BModel)" in markdown
    assert "| full\\|GQA | 4.096 kB |" in markdown
    assert "**assumptions**\n\n- a page holds 16 tokens" in markdown
    assert csv_text == (
        "# totals\n"
        "total,value\n"
        "bytes_per_token,131072\n"
        "layers,32\n"
        "seconds,\n"
        "\n"
        "# layers\n"
        "kind,bytes,share,shape,fits,window\n"
        'full|GQA,4096,0.25,"[8, 128]",true,\n'
        'sliding,12288,0.75,"[8, 64]",false,4096\n'
        "\n"
    )
    assert json.loads(json_text) == RESULT.to_dict()


def test_every_figure_of_the_csv_is_the_one_of_the_json():
    rows = list(csv.DictReader(io.StringIO(render([RESULT], "csv", table="layers"))))

    for text, value in zip(rows, RESULT.to_dict()["tables"]["layers"]["rows"], strict=True):
        for name, cell in value.items():
            assert text[name] == ("" if cell is None else cell if isinstance(cell, str) else json.dumps(cell))


@pytest.mark.parametrize("form", ["table", "markdown", "csv"])
def test_one_table_alone(form):
    text = render([RESULT], form, table="totals")

    assert "bytes_per_token" in text
    assert "sliding" not in text
    assert "assumptions" not in text
    assert "#" not in text


def test_an_unknown_table_names_the_near_ones():
    with pytest.raises(UnknownNameError, match=r"unknown table of `introspect kv` layer; did you mean layers\?"):
        render([RESULT], "csv", table="layer")


def test_several_models_are_one_json_array_and_one_csv():
    assert json.loads(render([RESULT, RESULT], "json")) == [RESULT.to_dict()] * 2
    lines = render([RESULT, RESULT], "csv", table="totals").splitlines()
    assert lines[0] == "model,total,value"
    assert lines[1:] == ["a/b,bytes_per_token,131072", "a/b,layers,32", "a/b,seconds,"] * 2
    assert render([RESULT, RESULT]).count("introspect kv a/b") == 2


def test_a_command_without_a_model_has_no_model_lines():
    text = render([Result(command="gpus", tables={"gpus": RESULT.tables["layers"]})])

    assert text.startswith("introspect gpus\n\ngpus\nkind ")


def test_a_drawing_is_printed_as_it_is():
    drawing = Result(command="trace", text="graph TD")

    assert [render([drawing], form) for form in ("table", "mermaid")] == ["graph TD\n"] * 2
    assert json.loads(render([drawing], "json"))["command"] == "trace"


def wide(columns, words=1):
    units = {"module": "", **{f"figure_number_{i}_bytes": "B" for i in range(columns)}}
    row = {"module": " ".join(["model.layers.*.mlp"] * words), **dict.fromkeys(list(units)[1:], 123456789)}
    return Result(command="trace", tables={"gemms": Table(units=units, rows=(row, row))})


@pytest.mark.parametrize("columns", [0, 3, 20])
@pytest.mark.parametrize("words", [1, 12])
@pytest.mark.parametrize("width", [60, 100])
def test_a_terminal_is_never_overrun_and_no_cell_is_lost(columns, words, width):
    text = render([wide(columns, words)], width=width)

    assert max(map(len, text.splitlines())) <= width
    assert text.count("123.5 MB") == 2 * columns
    assert text.count("model.layers.*.mlp") >= 2 * words


@pytest.mark.parametrize("form", ["table", "markdown", "csv", "json"])
def test_a_file_is_never_fitted(form):
    long = "x" * 400
    result = Result(command="a", tables={"t": Table(units={"text": ""}, rows=({"text": long},))})

    assert long in render([result], form)


def test_columns_without_a_value_are_left_out_only_where_width_is_short():
    result = Result(
        command="a", tables={"t": Table(units={"name": "", "gone": "B"}, rows=({"name": "x", "gone": None},))}
    )

    assert "gone" in render([result], width=80)
    assert "gone" not in render([result], width=8)


@pytest.mark.parametrize("form", ["table", "markdown", "csv"])
@pytest.mark.parametrize("width", [None, 3])
def test_tables_without_rows_or_values_are_shown_when_asked_for(form, width):
    result = Result(command="a", tables={"gone": Table(units={"gone": "B"}, rows=({"gone": None},))})

    assert "a" in render([RESULT], form, table="empty", width=width)
    assert "gone" in render([result], form, width=width)


def test_a_figure_that_is_no_number_is_a_mistake_of_ours():
    with pytest.raises(ValueError, match="Out of range float values are not JSON compliant"):
        render([Result(command="a", totals={"x": float("inf")})], "json")
