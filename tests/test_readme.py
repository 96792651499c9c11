"""Every `$ introspect ...` in README.md and docs/ prints what is shown there; --overwrite shows what is printed."""

import re
import shlex
from pathlib import Path

import pytest

from introspect.cli import main

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"```console\n\$ introspect (?P<arguments>[^\n]*)\n(?P<output>.*?)```", re.DOTALL)
SHOWN = [
    pytest.param(page, match["arguments"], match["output"], id=f"{page.stem}: {match['arguments']}")
    for page in PAGES
    for match in BLOCK.finditer(page.read_text(encoding="utf-8"))
]


@pytest.mark.parametrize(("page", "arguments", "shown"), SHOWN)
def test_shown_output_is_printed_output(page, arguments, shown, capsys, monkeypatch, request):
    monkeypatch.setenv("COLUMNS", "110")
    monkeypatch.chdir(ROOT)
    main(shlex.split(arguments))
    printed = capsys.readouterr().out
    if request.config.getoption("--overwrite"):
        text = page.read_text(encoding="utf-8")
        block = f"```console\n$ introspect {arguments}\n"
        page.write_text(text.replace(f"{block}{shown}```", f"{block}{printed}```"), encoding="utf-8")
        shown = printed

    assert printed == shown


def test_the_readme_shows_something():
    assert len(SHOWN) > 2
