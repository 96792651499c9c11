import os

import pytest

from introspect import atomic
from introspect.atomic import write_atomically
from introspect.errors import FileAccessError


def test_a_file_is_replaced_whole(tmp_path):
    path = tmp_path / "out.json"
    write_atomically(path, "old")
    write_atomically(path, "new µ")

    assert path.read_text(encoding="utf-8") == "new µ"
    assert os.listdir(tmp_path) == ["out.json"]


def test_a_failure_leaves_what_was_there_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "out.json"
    path.write_text("old")

    def refuse(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(atomic.os, "replace", refuse)
    with pytest.raises(KeyboardInterrupt):
        write_atomically(path, "new")

    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["out.json"]


def test_a_link_stays_a_link(tmp_path):
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("old")
    link.symlink_to(target)
    write_atomically(link, "new")

    assert link.is_symlink()
    assert target.read_text() == "new"


def test_a_device_is_written_to_and_not_replaced():
    write_atomically(type(atomic.Path())("/dev/null"), "gone")

    assert not os.path.isfile("/dev/null")


def test_new_files_have_the_usual_permissions(tmp_path):
    plain, ours = tmp_path / "plain", tmp_path / "ours"
    plain.write_text("")
    write_atomically(ours, "")

    assert plain.stat().st_mode == ours.stat().st_mode


def test_a_folder_that_is_missing_is_named(tmp_path):
    with pytest.raises(FileAccessError, match=r"missing/out: cannot write it: No such file or directory"):
        write_atomically(tmp_path / "missing" / "out", "x")


def test_a_folder_as_the_target_is_named(tmp_path):
    with pytest.raises(FileAccessError, match="cannot write it: Is a directory"):
        write_atomically(tmp_path, "x")
