"""The repository's shape: two links, one installed package, no package forgotten, every file checked by mypy."""

import configparser
import re
import subprocess
import sys
from pathlib import Path

import pytest

import introspect

ROOT = Path(__file__).parent.parent
SETUP = configparser.ConfigParser()
SETUP.read(ROOT / "setup.cfg", encoding="utf-8")


def sources():
    return [path for folder in ("introspect", "hooks", "analyzers") for path in (ROOT / folder).glob("*.py")]


@pytest.mark.parametrize("name", ["hooks", "analyzers"])
def test_links_point_to_the_folders_beside(name):
    link = ROOT / "introspect" / name

    assert link.is_symlink()
    assert link.readlink() == Path("..", name)


def test_every_package_is_listed_and_mapped():
    tops = [path for path in ROOT.iterdir() if path.name[0] != "." and path.name != "build"]
    folders = {path.parent.relative_to(ROOT) for top in tops for path in top.glob("**/__init__.py")}
    found = {"introspect" if folder == Path("introspect") else f"introspect.{folder.name}" for folder in folders}

    assert found == set(SETUP["options"]["packages"].split())
    assert all(len(folder.parts) == 1 or folder.parts[0] == "introspect" for folder in folders)  # kept flat


def test_the_version_is_said_once():
    assert SETUP["metadata"]["version"] == "attr: introspect.table.VERSION"
    assert introspect.__version__ in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_constraints_pin_every_requirement_and_no_path():
    pinned = (ROOT / "constraints.txt").read_text(encoding="utf-8").split()
    names = {line.partition("==")[0].lower().replace("_", "-") for line in pinned}
    wanted = " ".join([SETUP["options"]["install_requires"], *SETUP["options.extras_require"].values()])
    required = {re.match(r"[\w-]+", line)[0].lower().replace("_", "-") for line in wanted.split() if line[0].isalpha()}

    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in pinned)
    assert required <= names


def test_tests_are_no_package_and_hide_none():
    assert not list((ROOT / "tests").rglob("__init__.py"))
    assert not (ROOT / "tests" / "introspect").exists()


@pytest.mark.sweep
def test_mypy_checks_as_many_files_as_there_are():
    """Run where the links are missing, mypy would be green and blind."""
    done = subprocess.run([sys.executable, "-m", "mypy"], cwd=ROOT, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stdout
    assert f"in {len(sources())} source files" in done.stdout
