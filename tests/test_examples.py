"""Every example runs, and prints our number beside the published one."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))


def run(path):
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=600)

    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs_and_names_what_is_published(path):
    assert "published" in run(path)


def test_formats_equal_what_is_published():
    (path,) = (path for path in EXAMPLES if path.stem == "formats_and_numerics")
    rows = [line[38:].split()[:2] for line in run(path).splitlines()[1:13]]

    assert len(rows) == 12
    for ours, published in rows:
        assert float(ours) == pytest.approx(float(published), rel=1e-4)
