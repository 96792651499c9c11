from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

from support.small_trace import small_trace

from introspect.hooks.native_format import gather, source_of
from introspect.params import AccessParams
from introspect.sources import resolve
from introspect.traces import Live, Stored

ACCESS = AccessParams()


def live(model):
    return Live(resolve(model), ACCESS)


def test_a_config_without_quantisation_has_no_format_of_its_own():
    assert gather(None, live("meta-llama/Meta-Llama-3-8B")) is None


def test_a_quantised_config_has():
    native = gather(None, live("Qwen/Qwen3-8B-FP8"))

    assert native.method == "fp8"
    assert len(native.parameters) == 36 * 7


def stored(**config):
    trace = small_trace()
    return Stored(replace(trace, model=replace(trace.model, config=config)), ACCESS)


def test_a_stored_record_carries_its_config_and_the_side_file():
    side = {"quantization": {"quant_algo": "FP8"}}
    found = source_of(stored(model_type="llama", hf_quant_config=side))

    assert found.config == {"model_type": "llama"}
    assert found.hf_quant_config == side


def test_a_record_of_a_plain_module_has_no_config():
    assert source_of(stored()) is None


def test_a_plain_module_has_none():
    assert gather(None, Live(object(), ACCESS)) is None


def test_asking_imports_no_torch_where_nothing_is_quantised():
    code = (
        "import sys\n"
        "from introspect.hooks.native_format import gather\n"
        "from introspect.params import AccessParams\n"
        "from introspect.sources import resolve\n"
        "from introspect.traces import Live\n"
        "gather(None, Live(resolve('meta-llama/Meta-Llama-3-8B'), AccessParams()))\n"
        "sys.exit('torch' in sys.modules)\n"
    )

    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
