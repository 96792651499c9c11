"""Any bytes at all as a checkpoint: no crash, no hang, no false "clean"."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import hypothesis
import pytest
from hypothesis import strategies as st
from support.badfiles import FILES, good, header
from support.fuzz_headers import examine, one_input, refused

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)
DTYPES = st.sampled_from(["F32", "BF16", "I8", "F4", "F8_E4M3", "C64", "XX"]) | JSON
SIZES = st.integers(0, 9) | st.integers(-2, 2**65)
ENTRIES = st.fixed_dictionaries(
    {
        "dtype": DTYPES,
        "shape": st.lists(SIZES, max_size=3) | JSON,
        "data_offsets": st.lists(SIZES, min_size=2, max_size=2) | JSON,
    }
)
HEADERS = st.dictionaries(st.text(max_size=6), ENTRIES | JSON, max_size=5)
SMALL_FILES = st.builds(
    lambda fields, data, pad: header(json.dumps(fields).encode(), data, pad=pad),
    HEADERS | JSON,
    st.binary(max_size=40),
    st.sampled_from([1, 8]),
)


@st.composite
def damaged(draw):
    """A good file with some bytes changed, cut out or put in."""
    data = bytearray(good(tuple(draw(st.lists(st.text("ab.01", min_size=1, max_size=6), unique=True, max_size=4)))))
    for _ in range(draw(st.integers(0, 4))):
        place = draw(st.integers(0, len(data)))
        data[place : place + draw(st.integers(0, 3))] = draw(st.binary(max_size=3))
    return bytes(data)


def judge(data):
    """Nothing that safetensors refuses may be found without an error."""
    assert examine(data) or not refused(data)


@hypothesis.given(damaged() | SMALL_FILES | st.binary(max_size=200))
@hypothesis.settings(max_examples=150)
def test_any_file_is_judged(data):
    judge(data)


@hypothesis.given(JSON)
@hypothesis.settings(max_examples=60)
def test_any_json_as_header_is_judged(value):
    one_input(json.dumps(value).encode())


@pytest.mark.sweep
@hypothesis.given(damaged() | SMALL_FILES | st.binary(max_size=2000))
@hypothesis.settings(max_examples=20_000, suppress_health_check=list(hypothesis.HealthCheck))
def test_any_file_is_judged_for_long(data):
    judge(data)


@pytest.mark.sweep
@pytest.mark.skipif(find_spec("atheris") is None, reason="atheris (extra `test`) has no wheel for this Python")
def test_coverage_guided_fuzzing(tmp_path):
    """atheris starts from the zoo and follows the branches it has not taken; a crash, a hang or 2 GB end it."""
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for number, bad in enumerate(FILES):
        folder = tmp_path / str(number)
        folder.mkdir()
        content = bad.make(folder).read_bytes()
        if len(content) < 4096:
            (corpus / str(number)).write_bytes(content)
    script = Path(__file__).parent / "support" / "fuzz_headers.py"

    limits = ["-runs=20000", "-max_total_time=120", "-max_len=4096", "-timeout=10", "-rss_limit_mb=2048"]
    done = subprocess.run(
        [sys.executable, str(script), *limits, f"-artifact_prefix={tmp_path}/", str(corpus)],
        capture_output=True,
        text=True,
        timeout=400,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])},
        check=False,
    )

    assert done.returncode == 0, done.stderr[-3000:]
    assert "Done " in done.stderr
