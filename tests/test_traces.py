import logging
import shutil

import pytest
from support.small_trace import small_trace

import introspect
from introspect import store, traces
from introspect.errors import FileAccessError, IntrospectError, OptionError, TraceFormatError, TraceShapeError
from introspect.params import AccessParams
from introspect.records import RunShape
from introspect.sources import resolve
from introspect.traces import Live, Stored, open_model

ACCESS = AccessParams()
LLAMA = "meta-llama/Meta-Llama-3-8B"


@pytest.fixture
def observed(monkeypatch, tmp_path):
    """An empty store, and a model whose runs are counted and not made."""
    monkeypatch.setenv("INTROSPECT_CACHE", str(tmp_path / "cache"))
    source = resolve(LLAMA)
    runs = []

    def observe(self, run):
        runs.append(run)
        identity = introspect.records.ModelIdentity(
            id=source.id, class_name="X", source="", config_sha256=source.config_sha256, config={}
        )
        return introspect.records.replace(small_trace(), model=identity, run=run.with_(dtype=run.dtype or "bf16"))

    monkeypatch.setattr(Live, "_observe", observe)
    return runs


def test_a_run_is_made_once_and_answered_from_the_store_after(observed):
    run = RunShape(batch=3)
    first, again, later = Live(resolve(LLAMA), ACCESS), None, Live(resolve(LLAMA), ACCESS)
    record, again = first(run), first(run)

    assert later(run) == record == again
    assert observed == [run]
    assert first.handed == [record, again]


def test_another_shape_is_another_run(observed):
    live = Live(resolve(LLAMA), ACCESS)

    assert live(RunShape(context=5)).run.context == 5
    assert live(RunShape(context=6)).run.context == 6
    assert len(observed) == 2


def test_no_cache_neither_reads_nor_writes(observed):
    for _ in range(2):
        Live(resolve(LLAMA), AccessParams(no_cache=True))(RunShape())

    assert len(observed) == 2
    assert not store.cache_directory().exists()


def test_a_factory_or_own_inputs_are_never_stored(observed, tmp_path):
    (tmp_path / "model.py").write_text("def build(): ...")
    for live in (Live(resolve(f"{tmp_path}/model.py:build"), ACCESS), Live(resolve(LLAMA), ACCESS, inputs={"x": 1})):
        live(RunShape())

    assert not store.cache_directory().exists()


def test_a_truncated_entry_is_rebuilt(observed):
    Live(resolve(LLAMA), ACCESS)(RunShape())
    (entry,) = (store.cache_directory() / "traces").iterdir()
    whole = entry.read_bytes()
    entry.write_bytes(whole[:100])
    Live(resolve(LLAMA), ACCESS)(RunShape())

    assert len(observed) == 2
    assert entry.read_bytes() == whole


def test_an_entry_copied_over_another_is_not_believed(observed):
    source = resolve(LLAMA)
    places = [store.entry_path(source.digest, source.id, RunShape(batch=batch)) for batch in (1, 2)]
    Live(source, ACCESS)(RunShape(batch=1))
    shutil.copy(*places)

    assert Live(source, ACCESS)(RunShape(batch=2)).run.batch == 2
    assert len(observed) == 2


def test_a_store_that_cannot_be_written_is_said_and_the_answer_given(observed, tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("INTROSPECT_CACHE", str(tmp_path / "file"))
    with caplog.at_level(logging.WARNING, "introspect"):
        record = Live(resolve(LLAMA), ACCESS)(RunShape())

    assert record.run.phase == "prefill"
    assert "file/traces: cannot write it: Not a directory; traces are not kept" in caplog.text


def test_a_stored_trace_answers_for_its_own_run_only():
    trace = small_trace()
    stored = Stored(trace, ACCESS)

    assert stored(trace.run) is trace
    assert stored(trace.run.with_(dtype=None)) is trace  # the dtype left open
    with pytest.raises(
        TraceShapeError, match=r"holds one run \(context 16\) and cannot answer for another \(context 8\)"
    ):
        stored(trace.run.with_(context=8))
    with pytest.raises(TraceShapeError, match=r"\(dtype bf16\) .* \(dtype fp32\)"):
        stored(trace.run.with_(dtype="fp32"))
    assert stored.handed == [trace, trace]


def test_other_models_are_found_the_same_way(tmp_path):
    path = tmp_path / "saved.json"
    introspect.save_trace(small_trace(), path)
    stored = Stored(small_trace(), AccessParams(offline=True))

    assert stored.other(str(path)) == stored
    assert stored.other(LLAMA).access.offline
    with pytest.raises(IntrospectError, match=r"no model 'meta-llama/Meta-Llama-3-8'.*did you mean"):
        Live(None, AccessParams(offline=True)).other("meta-llama/Meta-Llama-3-8")


def test_a_saved_trace_is_told_from_a_config(tmp_path):
    saved, config = tmp_path / "saved.json", tmp_path / "config.json"
    introspect.save_trace(small_trace(), saved)
    config.write_text('{"model_type": "llama"}')

    assert traces.is_trace_file(saved)
    assert not traces.is_trace_file(config)
    assert not traces.is_trace_file(tmp_path)
    assert not traces.is_trace_file(tmp_path / "missing")
    assert isinstance(open_model(str(saved), ACCESS), Stored)


def test_what_cannot_be_a_model_is_named():
    with pytest.raises(OptionError, match="model: got 'int', expected a name, a path, a transformers config"):
        open_model(3, ACCESS)


def test_loading_names_the_file_and_the_reason(tmp_path):
    with pytest.raises(FileAccessError, match="missing: cannot read it: No such file"):
        introspect.load_trace(tmp_path / "missing")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    with pytest.raises(TraceFormatError, match="bytes: not a readable trace: not UTF-8"):
        introspect.load_trace(tmp_path / "bytes")


def test_a_config_object_is_a_source_of_its_own():
    from transformers import LlamaConfig

    source = open_model(LlamaConfig(hidden_size=64), ACCESS).model

    assert (source.kind, source.id, source.config["hidden_size"]) == ("object", "llama", 64)
    assert source.digest != open_model(LlamaConfig(hidden_size=32), ACCESS).model.digest


def test_a_fact_beside_the_run_is_asked_of_the_built_module(tiny_config):
    model = open_model(tiny_config, AccessParams())
    (rope,) = model.gather("rope.gather_rope", length=16)
    assert (rope.module, len(rope.inv_freq)) == ("model.rotary_emb", 4)  # heads of 32 / 4, two dimensions a pair


def test_a_stored_record_has_no_module_to_ask():
    with pytest.raises(OptionError, match="got 'a stored trace', expected a model that can be built"):
        open_model(small_trace(), AccessParams()).gather("rope.gather_rope", length=16)
