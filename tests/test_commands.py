import importlib
from dataclasses import is_dataclass

import pytest

from introspect.commands import command_help, command_names, load_command
from introspect.errors import UnknownNameError
from introspect.options import options_of

NAMES = command_names()


def test_files_with_an_underscore_are_no_commands():
    assert "gpus" in NAMES
    assert not [name for name in NAMES if name.startswith("_")]
    assert list(NAMES) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_every_command_keeps_the_contract_of_its_file(name):
    command = load_command(name)
    first_line = importlib.import_module(f"introspect.analyzers.{name}").__doc__.splitlines()[0]

    assert command_help(name) == first_line  # read without importing, so it must stand on the file's first line
    assert first_line.endswith((".", "?"))
    assert command.models in ("none", "one", "two", "many")
    assert is_dataclass(command.params)
    assert command.examples
    assert all(line.startswith(f"introspect {name}") for line in command.examples)


@pytest.mark.parametrize("name", NAMES)
def test_every_option_is_explained_and_short_names_are_unique(name):
    options = options_of(load_command(name).params)
    shorts = [option.short for option in options if option.short]

    assert all(option.help for option in options)
    assert len(shorts) == len(set(shorts))
    assert "o" not in shorts  # -o is the output file
    assert "h" not in shorts


@pytest.mark.parametrize("name", NAMES)
def test_every_default_is_within_its_own_bounds(name):
    params = load_command(name).params
    from introspect.options import build

    defaults = {option.name: option.default for option in options_of(params)}
    assert build(params, defaults) == params()


def test_an_unknown_command_names_the_near_ones():
    with pytest.raises(UnknownNameError, match=r"unknown command gpu; did you mean gpus\?"):
        load_command("gpu")
    with pytest.raises(UnknownNameError, match="unknown command xyzzy; see --help"):
        load_command("xyzzy")


def test_a_file_dropped_into_the_folder_is_a_command(demo_commands):
    command = load_command("demo")

    assert "demo" in command_names()
    assert command_help("demo") == "Count the products of a model: 100 % of them."
    assert command.formats == ("drawing",)
