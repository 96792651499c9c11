"""What must answer at once imports no torch: proved in a process of its own, since tests here import it freely."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import introspect

HEAVY = ("torch", "transformers", "accelerate", "numpy", "matplotlib")
DEMO = str(Path(__file__).parent / "support" / "commands")

PROGRAM = f"""
import json, sys
import introspect.analyzers
introspect.analyzers.__path__.append({DEMO!r})
{{first}}
from introspect.cli import main
try:
    code = main({{argv!r}})
except SystemExit as stopped:
    code = stopped.code
print(json.dumps([code, [name for name in {HEAVY!r} if name in sys.modules]]), file=sys.stderr)
"""


def heavy_imports(*argv, first=""):
    """(exit code, heavy modules imported) of one command line in a fresh process."""
    program = PROGRAM.format(argv=list(argv), first=first)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    return tuple(json.loads(done.stderr.splitlines()[-1]))


@pytest.fixture(scope="module")
def config(tiny_config):
    """A tiny Llama whose decode step is in the store already."""
    heavy_imports("demo", tiny_config, "--phase", "decode", "--context", "16")
    return tiny_config


@pytest.mark.parametrize(
    "argv",
    [
        ["--help"],
        ["--version"],
        ["gpus"],
        ["gpus", "--format", "json"],
        ["models"],
        ["demo", "--help"],
        ["completion", "bash"],
        ["demo", "no-such-model", "--offline"],
        ["demo", "meta-llama/Meta-Llama-3-8B", "--batch", "0"],
    ],
)
def test_help_data_and_errors_import_nothing_heavy(argv):
    code, imported = heavy_imports(*argv)

    assert code in (0, 2)
    assert imported == []


@pytest.mark.parametrize("form", ["table", "markdown", "csv", "json"])
def test_an_answer_from_the_store_imports_nothing_heavy(config, form):
    argv = ["demo", config, "--phase", "decode", "--context", "16", "--format", form]

    assert heavy_imports(*argv) == (0, [])


def test_importing_the_package_imports_nothing_heavy():
    assert heavy_imports("--version", first="import introspect.api, introspect.traces, introspect.sources") == (0, [])


def test_these_tests_can_fail(config):
    assert heavy_imports("--version", first="import torch")[1] != []
    # A run that is not in the store has to run the model.
    assert "torch" in heavy_imports("demo", config, "--phase", "decode", "--context", "17")[1]


def test_two_processes_may_fill_the_store_at_once(config, tmp_path):
    """Both answer, and what is left in the store is whole."""
    program = "import sys, introspect; print(len(introspect.trace(sys.argv[1], phase='decode', context=18).ops))"
    environment = {**os.environ, "INTROSPECT_CACHE": str(tmp_path)}
    both = [
        subprocess.Popen([sys.executable, "-c", program, config], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    answers = [process.communicate()[0] for process in both]

    assert answers[0] == answers[1] != ""
    (entry,) = (tmp_path / "traces").iterdir()
    assert introspect.load_trace(entry).run.context == 18
