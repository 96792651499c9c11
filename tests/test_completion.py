import shlex
import shutil
import subprocess

import pytest

from introspect import catalog
from introspect.cli import main
from introspect.completion import SHELLS


@pytest.fixture
def script(capsys, demo_commands):
    def make(shell):
        assert main(["completion", shell]) == 0
        return capsys.readouterr().out

    return make


def complete(script, *words):
    """What bash would offer for the last word."""
    asked = f"COMP_WORDS=({shlex.join(words)}); COMP_CWORD={len(words) - 1}; _introspect\n"
    program = script + asked + 'printf "%s\\n" "${COMPREPLY[@]}"'
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=True)
    return done.stdout.split()


@pytest.mark.skipif(not shutil.which("bash"), reason="no bash")
def test_bash_offers_commands_options_values_models_and_files(script, tmp_path, monkeypatch):
    bash = script("bash")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "meta-llama.json").write_text("{}")

    assert complete(bash, "introspect", "dem") == ["demo"]
    assert complete(bash, "introspect", "comp") == ["completion"]
    assert complete(bash, "introspect", "completion", "") == list(SHELLS)
    assert complete(bash, "introspect", "demo", "--pha") == ["--phase"]
    assert complete(bash, "introspect", "demo", "--phase", "") == ["prefill", "decode", "train"]
    assert complete(bash, "introspect", "demo", "--format", "m") == ["markdown"]
    offered = complete(bash, "introspect", "demo", "meta-llama")
    assert "meta-llama/Meta-Llama-3-8B" in offered
    assert "meta-llama.json" in offered
    assert complete(bash, "introspect", "crash", "meta-llama") == ["meta-llama.json"]  # takes no model


@pytest.mark.parametrize("shell", SHELLS)
def test_every_script_knows_commands_options_and_the_catalog(script, shell):
    text = script(shell)

    for word in ("demo", "gpus", "completion", catalog.entries()[0].id, "strict", "prefill"):
        assert word in text


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_accept_their_script(script, shell):
    if not shutil.which(shell):
        pytest.skip(f"no {shell} here")
    done = subprocess.run([shell, "-n"], input=script(shell), capture_output=True, text=True, check=False)

    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("arguments", [[], ["tcsh"], ["bash", "zsh"]])
def test_another_shell_is_refused(arguments, capsys):
    assert main(["completion", *arguments]) == 2
    assert "introspect: usage: introspect completion bash|zsh|fish" in capsys.readouterr().err
