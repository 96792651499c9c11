import json
import os
import shlex
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from support.small_trace import small_trace
from support.traces import llama

import introspect
from introspect.cli import main, option_names, parser_of
from introspect.commands import command_names, load_command

pytestmark = pytest.mark.usefixtures("demo_commands")


@pytest.fixture
def saved(tmp_path):
    """A stored trace, so that no model has to run."""
    path = tmp_path / "saved.json"
    introspect.save_trace(small_trace(), path)
    return str(path)


@pytest.fixture
def doubtful(tmp_path):
    path = tmp_path / "doubtful.json"
    introspect.save_trace(small_trace(doubtful=True), path)
    return str(path)


@pytest.fixture
def call(capsys):
    """Run one command line: exit code, stdout, stderr."""

    def run(*argv):
        code = main(argv)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def test_the_json_is_the_python_result(call, saved):
    code, out, err = call(
        "demo", saved, "--format", "json", "--sizes", "2k", "--sizes", "3", "--mode", "slow", "a note"
    )

    assert (code, err) == (0, "")
    expected = introspect.analyze("demo", saved, sizes=(2048, 3), mode="slow", note="a note")
    assert json.loads(out) == expected.to_dict()


@pytest.mark.parametrize("form", ["table", "markdown", "csv", "json"])
def test_stdout_is_data_and_stderr_talk(call, saved, form):
    code, out, err = call("demo", saved, "--format", form)

    assert (code, err) == (0, "")
    assert "layers.0.proj" in out


def test_a_drawing_is_a_format_of_the_commands_that_have_one(call, saved):
    assert call("demo", saved, "--format", "drawing") == (0, "a -> b\n", "")
    assert call("pair", saved, "--format", "drawing")[0] == 2


def test_several_models_make_one_array(call, saved):
    assert len(json.loads(call("pair", saved, saved, "--format", "json")[1])) == 2
    assert json.loads(call("pair", saved, "--format", "json")[1])["command"] == "pair"


def test_output_goes_to_a_file_whole(call, saved, tmp_path):
    path = tmp_path / "out.csv"
    assert call("demo", saved, "-o", str(path), "--format", "csv", "--table", "totals") == (0, "", "")
    assert path.read_text() == "total,value\ntotal_flops,896\nproducts,2\n"


def test_nothing_is_written_when_something_is_wrong(call, saved, tmp_path):
    path = tmp_path / "out.csv"
    assert call("demo", saved, "-o", str(path), "--table", "totls")[0] == 2
    assert call("demo", saved, "-o", str(path), "--batch", "0")[0] == 2
    assert not path.exists()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["demoo", "x"], "unknown command demoo; did you mean demo?"),
        (["--phase"], "expected a command first, found --phase; see `introspect --help`"),
        (["demo"], "the following arguments are required: MODEL; see `introspect demo --help`"),
        (["demo", "MODEL", "--bach", "8"], "unknown option of `introspect demo` --bach; did you mean --batch?"),
        (["demo", "MODEL", "--bach=8"], "unknown option of `introspect demo` --bach; did you mean --batch?"),
        (["demo", "MODEL", "-q"], "unknown option of `introspect demo` -q"),
        (["demo", "MODEL", "--batch"], "argument -b/--batch: expected one argument; see `introspect demo --help`"),
        (["demo", "MODEL", "--batch", "0"], "--batch: got 0, expected an integer at least 1 and at most 1,000,000,000"),
        (
            ["demo", "MODEL", "--batch", "-4"],
            "--batch: got -4, expected an integer at least 1 and at most 1,000,000,000",
        ),
        (
            ["demo", "MODEL", "-b", "two"],
            "--batch: got 'two', expected an integer at least 1 and at most 1,000,000,000",
        ),
        (["demo", "MODEL", "-c", "-1"], "--context: got -1, expected an integer at least 0 and at most 16,777,216"),
        (["demo", "MODEL", "--share", "1.5"], "--share: got 1.5, expected a number above 0 and at most 1"),
        (["demo", "MODEL", "--share", "half"], "--share: got 'half', expected a number above 0 and at most 1"),
        (["demo", "MODEL", "--mode", "fst"], "--mode: got 'fst', expected fast or slow; did you mean fast?"),
        (
            ["demo", "MODEL", "--phase", "decod"],
            "--phase: got 'decod', expected prefill, decode or train; did you mean decode?",
        ),
        (["demo", "MODEL", "--context", "17"], "holds one run (context 16) and cannot answer for another (context 17)"),
        (["demo", "MODEL", "--table", "gemm"], "unknown table of `introspect demo` gemm; did you mean gemms?"),
        (
            ["demo", "MODEL", "--table", "gemms", "--format", "json"],
            "--table chooses what table, markdown and csv show",
        ),
        (["demo", "MODEL", "-o", "/no/such/folder/x"], "/no/such/folder/x: cannot write it: No such file or directory"),
        (["demo", "./missing.json"], "no model './missing.json'"),
        (["gpus", "MODEL"], "unrecognized arguments"),
    ],
)
def test_bad_usage_is_one_line_and_exit_code_2(call, saved, argv, message):
    code, out, err = call(*(saved if word == "MODEL" else word for word in argv))

    assert (code, out) == (2, "")
    assert err.startswith("introspect: ")
    assert message in err
    assert err.count("\n") == 1
    assert "Traceback" not in err


def test_a_damaged_trace_file_is_one_line(call, saved):
    with open(saved, "r+b") as file:
        file.truncate(500)
    code, _, err = call("demo", saved)

    assert code == 2
    assert "saved.json: not a readable trace: not JSON" in err


def test_findings_are_exit_code_1(call, saved):
    assert call("demo", saved, "--fail")[0] == 1


def test_a_part_that_could_not_be_read_is_exit_code_2(call):
    assert call("crash", "--how", "unreadable")[0] == 2
    assert call("crash", "--how", "note")[0] == 0


def test_strict_refuses_what_was_assumed_or_unknown(call, saved, doubtful):
    assert call("demo", saved, "--strict")[0] == 0
    assert call("demo", doubtful)[0] == 0
    code, out, err = call("demo", doubtful, "--strict")

    assert code == 1
    assert "total_flops" in out
    assert "introspect: --strict: unclassified op aten.odd in layers.0 (3)\n" in err
    assert "introspect: --strict: assumed Tensor.any = False at model.py:7\n" in err


def test_strict_refuses_what_a_record_assumed_where_it_is_listed(call, tmp_path):
    path = tmp_path / "assumed.json"
    assumed = "the config names no dtype; bf16 assumed"
    introspect.save_trace(replace(llama(), assumptions=(assumed,)), path)

    assert call("params", str(path))[0] == 0
    code, _, err = call("params", str(path), "--strict")
    assert (code, err) == (1, f"introspect: --strict: assumption: {assumed}\n")
    assert call("demo", str(path), "--strict")[0] == 0  # does not list what the record assumed


def test_strict_lets_the_assumptions_of_a_question_pass(call, tiny_config):
    code, out, err = call("roofline", tiny_config, "--phase", "decode", "--context", "8", "--strict")

    assert (code, err) == (0, "")
    assert "assumptions" in out


def test_a_bug_is_one_line_and_a_traceback_on_request(call, monkeypatch):
    code, out, err = call("crash")
    assert (code, out) == (70, "")
    assert err == (
        "introspect: a bug of introspect, not of your input: ZeroDivisionError: first line; "
        "INTROSPECT_DEBUG=1 shows the traceback\n"
    )
    monkeypatch.setenv("INTROSPECT_DEBUG", "1")
    with pytest.raises(ZeroDivisionError):
        main(["crash"])


def test_ctrl_c_is_exit_code_130(call):
    assert call("crash", "--how", "KeyboardInterrupt") == (130, "", "introspect: interrupted\n")


@pytest.fixture
def interruptible():
    """Ctrl-C as in a terminal, also for child processes: a shell's background jobs start with it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_that_a_library_swallowed_is_no_bug(call):
    assert call("crash", "--how", "swallow") == (130, "", "introspect: interrupted\n")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler  # left as it was


@pytest.mark.usefixtures("interruptible")
def test_a_running_command_stops_on_ctrl_c_and_leaves_nothing(tmp_path):
    path = tmp_path / "out.json"
    program = (
        "import sys, introspect.analyzers as a; from introspect.cli import main; a.__path__.append(sys.argv[1]); "
        "sys.exit(main(['crash', '--how', 'wait', '-o', sys.argv[2]]))"
    )
    argv = [sys.executable, "-c", program, str(Path(__file__).parent / "support" / "commands"), str(path)]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)

    assert (process.returncode, err) == (130, "introspect: interrupted\n")
    assert list(tmp_path.iterdir()) == []


def test_a_reader_that_leaves_is_no_error():
    program = "import sys; from introspect.cli import main; sys.exit(main(['gpus', '--format', 'json']))"
    read, write = os.pipe()
    os.close(read)
    with open(write, "wb") as closed:
        done = subprocess.run([sys.executable, "-c", program], stdout=closed, stderr=subprocess.PIPE, check=False)

    assert (done.returncode, done.stderr) == (0, b"")


def test_help_shows_the_docstring_options_defaults_and_examples(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["demo", "--help"])
    out = capsys.readouterr().out

    assert stopped.value.code == 0
    assert "usage: introspect demo MODEL [NOTE] [options]" in out
    assert "Count the products of a model: 100 % of them." in out
    assert "a share, 50 % by default (default: 0.5)" in out
    assert "introspect demo meta-llama/Meta-Llama-3-8B --phase decode" in out


def test_the_overview_lists_every_command_with_its_line(call):
    code, out, _ = call("--help")

    assert code == 0
    assert all(f"\n  {name} " in out for name in command_names())
    assert "Count the products of a model" in out
    assert call() == (2, "", out)  # nothing asked: no data


def test_the_version_is_the_packages(call):
    assert call("--version") == (0, f"introspect {introspect.__version__}\n", "")


def test_the_module_runs_as_the_command():
    done = subprocess.run(
        [sys.executable, "-m", "introspect", "--version"], capture_output=True, text=True, check=False
    )

    assert done.stdout == f"introspect {introspect.__version__}\n"


def test_columns_says_how_wide_a_table_may_be(call, saved, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    narrow = call("demo", saved, "--table", "gemms")[1]
    monkeypatch.delenv("COLUMNS")
    wide = call("demo", saved, "--table", "gemms")[1]

    assert max(map(len, narrow.splitlines())) <= 40 < max(map(len, wide.splitlines()))


def test_the_option_list_is_frozen(golden, monkeypatch):
    """Options are a promise to scripts: a change is made on purpose (`pytest --overwrite`) and put in CHANGELOG.md."""
    monkeypatch.undo()  # the real commands only
    lines = []
    for name in command_names():
        parser = parser_of(load_command(name))
        for option, takes_value in sorted(option_names(parser).items()):
            lines.append(f"{name} {option}{' VALUE' if takes_value else ''}\n")
    golden("options.txt", "".join(lines))


@pytest.mark.parametrize(("redirect", "problem"), [(">/dev/full", "No space left on device"), (">&-", "it is closed")])
def test_output_that_cannot_be_written_is_one_line_and_exit_code_2(redirect, problem):
    command = f"{shlex.quote(sys.executable)} -m introspect gpus {redirect}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, stdin=subprocess.DEVNULL)

    assert done.returncode == 2
    assert done.stderr == f"introspect: standard output: cannot write it: {problem}\n"


def test_a_pipe_is_no_model(tmp_path, capsys):
    os.mkfifo(tmp_path / "pipe.json")

    assert main(["params", str(tmp_path / "pipe.json")]) == 2
    assert "no regular file (a pipe, socket or device)" in capsys.readouterr().err


def test_an_answer_is_no_model(tmp_path, capsys):
    path = tmp_path / "answer.json"
    path.write_text('{"introspect": "0.1.0", "command": "kv", "totals": {}}')

    assert main(["params", str(path)]) == 2
    assert "an answer of `introspect kv`, which holds no record; expected a model" in capsys.readouterr().err
