import os
from dataclasses import fields
from pathlib import Path

import pytest
from support.small_trace import small_trace

from introspect import store
from introspect.errors import FileAccessError
from introspect.records import RunShape
from introspect.serialize import trace_to_json


@pytest.fixture(autouse=True)
def empty_store(tmp_path, monkeypatch):
    monkeypatch.setenv("INTROSPECT_CACHE", str(tmp_path / "cache"))


def test_the_cache_directory_follows_the_platform(monkeypatch):
    monkeypatch.setenv("INTROSPECT_CACHE", "/a")
    assert store.cache_directory() == Path("/a")
    monkeypatch.delenv("INTROSPECT_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    assert store.cache_directory() == Path("/b/introspect")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/c")
    assert store.cache_directory() == Path("/c/.cache/introspect")
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(store.os.path, "expanduser", lambda path: path)  # no such user, as in many containers
    assert store.cache_directory() == Path("/.cache/introspect")


def test_what_was_saved_is_loaded():
    path = store.entry_path("digest", "id", RunShape())
    assert store.load(path) is None
    store.save(path, small_trace())

    assert store.load(path) == small_trace()


OTHER = {"phase": "train", "dtype": "fp32", "logits": "last", "routing": "zipf", "lora_targets": ("q_proj",)}


@pytest.mark.parametrize("name", [member.name for member in fields(RunShape)])
def test_every_field_of_the_run_is_part_of_the_key(name):
    run = RunShape()
    other = run.with_(**{name: OTHER.get(name) or getattr(run, name) + 1})

    assert store.entry_path("digest", "id", run) != store.entry_path("digest", "id", other)


def test_model_versions_and_code_are_part_of_the_key(monkeypatch):
    paths = {store.entry_path("digest", "id", RunShape())}
    paths.add(store.entry_path("other", "id", RunShape()))
    paths.add(store.entry_path("digest", "other", RunShape()))
    monkeypatch.setattr(store, "versions", lambda: {"torch": "9"})
    paths.add(store.entry_path("digest", "id", RunShape()))
    monkeypatch.setattr(store, "_code_digest", lambda: "edited")
    paths.add(store.entry_path("digest", "id", RunShape()))

    assert len(paths) == 5


def test_the_code_digest_sees_an_edit_of_an_observing_file(tmp_path, monkeypatch):
    (tmp_path / "hooks").mkdir()
    rules = tmp_path / "hooks" / "rules.py"
    rules.write_text("a = 1")
    monkeypatch.setattr(store, "__file__", str(tmp_path / "store.py"))
    digests = set()
    for text in ("a = 1", "a = 12"):
        rules.write_text(text)
        digests.add(store._code_digest.__wrapped__())

    assert len(digests) == 2


def test_versions_are_those_that_are_installed():
    from importlib.metadata import version

    assert store.versions() == {"torch": version("torch"), "transformers": version("transformers")}


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[: len(data) // 2],
        lambda data: b"",
        lambda data: b"\xff" + data,
        lambda data: data[:-9] + data[-8:],
    ],
    ids=["cut", "empty", "not utf-8", "one byte gone"],
)
def test_a_damaged_entry_is_removed_and_never_believed(damage):
    path = store.entry_path("digest", "id", RunShape())
    store.save(path, small_trace())
    path.write_bytes(damage(path.read_bytes()))

    assert store.load(path) is None
    assert not path.exists()


def test_the_store_stays_within_its_size(monkeypatch):
    size = len(trace_to_json(small_trace())) + 1
    monkeypatch.setattr(store, "MOST_BYTES", 2 * size)
    paths = [store.entry_path(f"{i}", "id", RunShape()) for i in range(3)]
    for age, path in enumerate(paths[:2]):
        store.save(path, small_trace())
        os.utime(path, (1000 + age, 1000 + age))
    assert store.load(paths[0]) is not None  # used now, so the other one is the oldest
    store.save(paths[2], small_trace())

    assert [path.exists() for path in paths] == [True, False, True]


def test_a_store_that_cannot_be_made_says_so(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("INTROSPECT_CACHE", str(tmp_path / "file"))

    with pytest.raises(FileAccessError, match="file/traces: cannot write it: Not a directory"):
        store.save(store.entry_path("digest", "id", RunShape()), small_trace())
