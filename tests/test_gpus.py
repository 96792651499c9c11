"""Every row of the accelerator data, and every way a data file can be wrong."""

from __future__ import annotations

import json
from urllib.parse import urlparse

import pytest

from introspect.errors import GpuFileError, UnknownGpuError
from introspect.gpus import PEAK_DTYPES, find_gpus, load_gpus, user_gpu_file

GPUS = load_gpus()
NAMED_IN_THE_ISSUE = (
    *("h100-sxm", "h100-pcie", "h100-nvl", "h200", "h20", "a100-40g", "a100-40g-pcie", "a100-80g", "a100-80g-pcie"),
    *("a10", "a10g", "l4", "l40s", "v100", "t4", "rtx-3090", "rtx-4090", "rtx-5090", "rtx-6000-ada", "rtx-pro-6000"),
    *("b100", "b200", "b300", "gb200", "gh200", "mi250x", "mi300x", "mi325x", "mi355x", "gaudi2", "gaudi3"),
)
VENDORS = ("nvidia.com", "amd.com", "intel.com", "awsstatic.com", "semianalysis.com")

ROW = {
    "aliases": ["mine"],
    "memory_bytes": 24e9,
    "bandwidth_bytes_per_second": 1e12,
    "dense_peak_per_second": {"bf16": 1e14},
    "interconnect_bytes_per_second": None,
    "source_url": "https://vendor.example/sheet",
    "retrieved": "2026-01-31",
}


@pytest.fixture(autouse=True)
def _own_config_home(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


def write(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(rows if isinstance(rows, str) else json.dumps({"gpus": rows}))
    return str(path)


def test_every_promised_accelerator_is_there():
    assert set(NAMED_IN_THE_ISSUE) <= set(GPUS)
    assert len(NAMED_IN_THE_ISSUE) >= 25


@pytest.mark.parametrize("gpu", GPUS.values(), ids=GPUS)
def test_row_is_plausible(gpu):
    assert 16e9 <= gpu.memory_bytes <= 300e9
    assert 300e9 <= gpu.bandwidth_bytes_per_second <= 8e12
    assert 16e9 <= gpu.interconnect_bytes_per_second <= 900e9
    assert gpu.memory_bytes % 1e9 == 0, "decimal GB as the vendor prints them"
    assert {"fp16", "bf16"} & set(gpu.peaks)
    # reading all memory once takes 10 to 80 ms on every one of them: a slipped unit would show
    assert 0.01 < gpu.memory_bytes / gpu.bandwidth_bytes_per_second < 0.085
    assert 60e12 <= max(gpu.peak("fp16") or 0, gpu.peak("bf16") or 0) <= 2.6e15
    assert any(urlparse(gpu.source_url).hostname.endswith(vendor) for vendor in VENDORS)


@pytest.mark.parametrize("gpu", [gpu for gpu in GPUS.values() if "fp8" in gpu.peaks], ids=lambda gpu: gpu.name)
def test_fp8_is_twice_bf16(gpu):
    # Gaudi 3 runs both at one rate; every other sheet gives 2 (within its own rounding: L40S 733 / 362.05)
    assert gpu.peak("fp8") / gpu.peak("bf16") == pytest.approx(1 if gpu.name == "gaudi3" else 2, rel=0.015)


@pytest.mark.parametrize("gpu", [gpu for gpu in GPUS.values() if "bf16" in gpu.peaks], ids=lambda gpu: gpu.name)
def test_bf16_is_twice_tf32_and_the_ridge_is_their_share(gpu):
    if "tf32" in gpu.peaks and gpu.name != "gaudi3":
        assert gpu.peak("bf16") / gpu.peak("tf32") == pytest.approx(2, rel=0.02)
    assert 30 < gpu.ridge("bf16") < 500
    assert gpu.ridge("bf16") == gpu.peak("bf16") / gpu.bandwidth_bytes_per_second


@pytest.mark.parametrize(
    ("name", "dtype", "sparse"),
    [("h100-sxm", "bf16", 1979e12), ("h100-sxm", "fp8", 3958e12), ("l4", "bf16", 242e12), ("b200", "fp4", 18e15)],
)
def test_peak_is_half_the_printed_sparse_figure(name, dtype, sparse):
    assert GPUS[name].peak(dtype) == pytest.approx(sparse / 2, rel=2e-4)


def test_h100_ridge():
    # 989.4e12 / 3.35e12
    assert GPUS["h100-sxm"].ridge("bf16") == pytest.approx(295.34, abs=0.01)


def test_peak_of_a_torch_dtype_name_and_of_one_without_a_rate():
    assert GPUS["h100-sxm"].peak("fp8_e4m3fn") == 1978.9e12
    assert GPUS["b200"].peak("fp4_e2m1fn_x2") == 9000e12
    assert GPUS["v100"].peak("bf16") is None
    assert GPUS["v100"].ridge("bf16") is None
    assert GPUS["h100-sxm"].peak("int64") is None


def test_names_and_aliases_are_unique_and_find_the_same_row():
    names = [alias for gpu in GPUS.values() for alias in (gpu.name, *gpu.aliases)]
    assert len(names) == len(set(names))
    assert find_gpus(("H100", "a100")) == (GPUS["h100-sxm"], GPUS["a100-80g"])


def test_unknown_name_lists_the_nearest_and_stops():
    with pytest.raises(UnknownGpuError, match=r"no GPU named 'h1000'; nearest: .*h100.*introspect gpus") as caught:
        find_gpus(("h100", "h1000"))
    assert "h100" in caught.value.nearest
    with pytest.raises(UnknownGpuError, match="no GPU named 'qqq'; see"):
        find_gpus(("qqq",))


def test_gpu_file_and_user_file_add_rows(tmp_path):
    path = write(tmp_path / "more.json", {"my-card": ROW})
    write(user_gpu_file(), {"user-card": ROW | {"aliases": []}})
    gpus = load_gpus(path)
    assert list(gpus)[-2:] == ["user-card", "my-card"]
    assert find_gpus(("mine",), path)[0].peaks == {"bf16": 10**14}
    assert gpus["my-card"].interconnect_bytes_per_second is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"memory_bytes": 80}, r"card: memory_bytes: got 80, expected a number from 1e\+09 to 1e\+13"),
        ({"memory_bytes": True}, "memory_bytes: got True"),
        ({"bandwidth_bytes_per_second": "fast"}, "bandwidth_bytes_per_second: got 'fast'"),
        ({"bandwidth_bytes_per_second": float("nan")}, "bandwidth_bytes_per_second: got nan"),
        ({"dense_peak_per_second": {"bf16": 989}}, "dense_peak_per_second: got 989"),
        ({"dense_peak_per_second": {"fp7": 1e14}}, "expected some of fp32, tf32"),
        ({"dense_peak_per_second": {}}, "expected some of fp32, tf32"),
        ({"source_url": ""}, "source_url: got '', expected the https address of the data sheet"),
        ({"source_url": 3}, "source_url: got 3, expected text"),
        ({"retrieved": "lately"}, "retrieved: got 'lately', expected a date"),
        ({"aliases": "mine"}, "aliases: got 'mine', expected a list of lower-case names"),
        ({"aliases": ["h100"]}, "the name 'h100' is taken already; choose another"),
        ({"sparse": 1}, "sparse: unknown field, expected one of aliases"),
        ({"interconnect_bytes_per_second": -1}, "interconnect_bytes_per_second: got -1"),
    ],
)
def test_damaged_row_is_refused(tmp_path, change, message):
    path = write(tmp_path / "bad.json", {"card": ROW | change})
    with pytest.raises(GpuFileError, match=message) as caught:
        load_gpus(path)
    assert caught.value.source == path


@pytest.mark.parametrize("missing", ["memory_bytes", "bandwidth_bytes_per_second", "source_url", "retrieved"])
def test_missing_field_is_refused(tmp_path, missing):
    path = write(tmp_path / "bad.json", {"card": {key: value for key, value in ROW.items() if key != missing}})
    with pytest.raises(GpuFileError, match=f"card: {missing}"):
        load_gpus(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "file: not JSON"),
        ("[]", "the JSON is a list, not an object"),
        ("{}", r'gpus: expected \{"gpus"'),
        ('{"gpus": {"x": 3}}', "x: row: got 3, expected an object"),
        ('{"gpus": {"x": {"note": "a", "note": "b"}}}', "key 'note' appears twice"),
        ('{"gpus": {"x": {}, "x": {}}}', "key 'x' appears twice"),
        (json.dumps({"gpus": {"X": ROW}}), "expected a lower-case name"),
        (json.dumps({"gpus": {"h100-sxm": ROW}}), "the name 'h100-sxm' is taken already"),
    ],
)
def test_damaged_file_is_refused(tmp_path, text, message):
    with pytest.raises(GpuFileError, match=message):
        load_gpus(write(tmp_path / "bad.json", text))


def test_missing_file_is_named(tmp_path):
    with pytest.raises(GpuFileError, match=r"none\.json: file: cannot be read"):
        load_gpus(str(tmp_path / "none.json"))


def test_every_peak_has_a_column():
    assert {dtype for gpu in GPUS.values() for dtype in gpu.peaks} == set(PEAK_DTYPES)
