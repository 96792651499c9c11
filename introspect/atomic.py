"""Whole files or none: what is written appears under its name only when it is complete."""

from __future__ import annotations

import os
from pathlib import Path

from introspect.errors import FileAccessError


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write `content` (text as UTF-8) to `path`, or leave there what was. FileAccessError when the system refuses.

    A link is followed, so that it stays a link. What is no regular file (a device, a pipe) is written to directly:
    it cannot be replaced by one.
    """
    target = Path(os.path.realpath(path))
    data = content.encode() if isinstance(content, str) else content
    try:
        if target.exists() and not target.is_file():
            target.write_bytes(data)
            return
        part = target.with_name(f".{target.name}.{os.urandom(4).hex()}.part")
        try:
            with part.open("xb") as file:
                file.write(data)
            os.replace(part, target)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise FileAccessError(str(path), "write", error.strerror or str(error)) from None
