import gc
import json

import pytest
from hypothesis import given, settings
from strategies import traces
from support.small_trace import small_trace

from introspect.errors import TraceFormatError
from introspect.serialize import trace_from_json, trace_to_json


@given(traces)
@settings(deadline=None, max_examples=40)
def test_every_trace_comes_back_equal(trace):
    assert trace_from_json(trace_to_json(trace), "x") == trace


def test_values_keep_their_types():
    trace = trace_from_json(trace_to_json(small_trace()), "x")

    assert isinstance(trace.tensors[0].shape, tuple)
    assert trace.ops[1].body[1].body[0] == trace.ops[0]  # a Repeat in a Repeat is told from an Op
    assert trace.model.config == {"width": 4}


def test_a_name_is_stored_once():
    text = trace_to_json(small_trace())

    assert text.count("layers.0.proj.weight") == 1  # used by a parameter and by a tensor
    assert "\n" not in text


def test_a_file_may_end_in_a_line_break():
    trace = small_trace()

    assert trace_from_json(trace_to_json(trace) + "\n", "x") == trace


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda text: text[: len(text) // 2], "not JSON"),
        (lambda text: "[]", "JSON without the"),
        (lambda text: json.dumps({"config": 1}), "JSON without the"),
        (
            lambda text: text.replace('"introspect_trace":1', '"introspect_trace":99'),
            "schema 99, this introspect reads 1",
        ),
        (lambda text: text.replace('"visible_pairs"', '"visible_pears"'), "schema 1, this introspect reads 1"),
        (lambda text: text.replace("layers.0.proj", "layers.1.proj"), "does not match its sha256"),
        (lambda text: text.replace("[8,4]", "[8,5]"), "does not match its sha256"),
    ],
)
def test_a_damaged_or_foreign_document_is_refused_by_name(damage, words):
    with pytest.raises(TraceFormatError, match=words) as caught:
        trace_from_json(damage(trace_to_json(small_trace())), "saved.json")
    assert str(caught.value).startswith("saved.json: not a readable trace: ")
    assert "trace the model again" in str(caught.value)


@pytest.mark.parametrize("enabled", [True, False])
def test_the_garbage_collector_is_left_as_it_was(enabled):
    text = trace_to_json(small_trace())
    before = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        trace_from_json(text, "x")
        assert gc.isenabled() is enabled
        with pytest.raises(TraceFormatError):
            trace_from_json("{", "x")
        assert gc.isenabled() is enabled
    finally:
        (gc.enable if before else gc.disable)()
