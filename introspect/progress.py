"""One line of progress on stderr, for people only: shown after a second of waiting and only on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Thread
from time import monotonic
from typing import TextIO

PATIENCE = 1.0  # seconds before anything is shown
REFRESH = 0.2  # seconds between two drawings

_CLEAR = "\r\033[K"


@contextmanager
def progress(what: str, *, stream: TextIO | None = None) -> Iterator[Callable[[str], None]]:
    """While the body runs, say `what` it is doing and for how long. Call the yielded function to say something new."""
    stream = sys.stderr if stream is None else stream
    if not stream.isatty():
        yield lambda text: None
        return
    said = [what]
    done = Event()
    drawer = Thread(target=_draw, args=(said, done, stream), daemon=True)
    drawer.start()
    try:
        yield lambda text: said.__setitem__(0, text)
    finally:
        done.set()
        drawer.join()


def _draw(said: list[str], done: Event, stream: TextIO) -> None:
    start = monotonic()
    if done.wait(PATIENCE):
        return
    while True:
        stream.write(f"{_CLEAR}{said[0]} ... {monotonic() - start:.0f} s")
        stream.flush()
        if done.wait(REFRESH):
            break
    stream.write(_CLEAR)
    stream.flush()
