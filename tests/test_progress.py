import io
from threading import Event

import pytest

from introspect import progress as module
from introspect.progress import progress


class Screen(io.StringIO):
    """A terminal that says when something was written to it."""

    def __init__(self, terminal=True):
        super().__init__()
        self.terminal = terminal
        self.written = Event()

    def isatty(self):
        return self.terminal

    def write(self, text):
        count = super().write(text)
        self.written.set()
        return count


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(module, "PATIENCE", 0.0)
    monkeypatch.setattr(module, "REFRESH", 0.001)


def wait_for(screen, text):
    """Until `text` was drawn; the limit only ends a test that would fail."""
    for _ in range(5000):
        if text in screen.getvalue():
            return
        screen.written.wait(0.01)
        screen.written.clear()
    raise AssertionError(f"{text!r} was never drawn: {screen.getvalue()!r}")


def test_a_long_wait_is_drawn_and_wiped(impatient):
    screen = Screen()
    with progress("tracing a model", stream=screen) as say:
        wait_for(screen, "tracing a model ... 0 s")
        say("writing")
        wait_for(screen, "writing ... ")

    assert screen.getvalue().endswith("\r\033[K")


def test_a_failure_wipes_the_line_too(impatient):
    screen = Screen()

    def interrupted():
        with progress("tracing", stream=screen):
            wait_for(screen, "tracing")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()

    assert screen.getvalue().endswith("\r\033[K")


def test_a_short_wait_is_silent():
    screen = Screen()
    with progress("tracing", stream=screen):
        pass

    assert screen.getvalue() == ""


def test_a_file_gets_nothing(impatient):
    screen = Screen(terminal=False)
    with progress("tracing", stream=screen) as say:
        say("more")

    assert screen.getvalue() == ""
