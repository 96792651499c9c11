"""A server of one repository's files on the loopback, with range requests and every way they go wrong."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Thread
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Trouble:
    """What happens to one answer. `status`: this and its headers instead of the file. `cut`: the connection closes
    after so many bytes of the body. `stall`: nothing more is sent after so many bytes. `location`: a redirect there."""

    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    cut: int | None = None
    stall: int | None = None
    location: str | None = None


@dataclass
class Served:
    """Files of `owner/model`. `troubles`: by file, used up one answer at a time. `ranges` False: always the whole file.
    `asked`: (file, Range header, whether a token came) in order; `sent` bytes of bodies in all."""

    files: dict[str, bytes]
    troubles: dict[str, list[Trouble]] = field(default_factory=dict)
    ranges: bool = True
    lengths: bool = True
    override: dict[str, str] = field(default_factory=dict)
    asked: list[tuple[str, str | None, bool]] = field(default_factory=list)
    sent: int = 0
    address: str = ""
    closing: Event = field(default_factory=Event)


class _Handler(BaseHTTPRequestHandler):
    served: Served
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path).lstrip("/")
        if path.startswith("api/models/"):
            siblings = [{"rfilename": name} for name in self.served.files]
            self._send(200, {}, json.dumps({"id": "owner/model", "sha": COMMIT, "siblings": siblings}).encode())
            return
        file = path.rpartition("/")[2]
        self.served.asked.append((file, self.headers.get("Range"), "Authorization" in self.headers))
        waiting = self.served.troubles.get(file, [])
        self._answer(file, waiting.pop(0) if waiting else Trouble())

    def _answer(self, file: str, trouble: Trouble) -> None:
        if trouble.location is not None:
            self._send(302, {"Location": trouble.location}, b"")
        elif trouble.status is not None:
            self._send(trouble.status, trouble.headers, b"")
        elif file not in self.served.files:
            self._send(404, {"X-Error-Code": "EntryNotFound"}, b"")
        else:
            self._send_file(self.served.files[file], trouble)

    def _send_file(self, data: bytes, trouble: Trouble) -> None:
        match = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if match is None or not self.served.ranges:
            self._send(200, {**trouble.headers, **self.served.override}, data, trouble)
            return
        begin, end = int(match[1]), min(int(match[2]) + 1, len(data))
        if begin >= len(data):
            self._send(416, {"Content-Range": f"bytes */{len(data)}"}, b"")
            return
        place = {"Content-Range": f"bytes {begin}-{end - 1}/{len(data)}"}
        self._send(206, {**place, **trouble.headers, **self.served.override}, data[begin:end], trouble)

    def _send(self, status: int, headers: dict[str, str], body: bytes, trouble: Trouble | None = None) -> None:
        trouble = trouble or Trouble()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if self.served.lengths:
            self.send_header("Content-Length", str(len(body)))
        else:
            self.send_header("Connection", "close")
            self.close_connection = True
        self.end_headers()
        stop = trouble.cut if trouble.cut is not None else trouble.stall
        try:
            self._write(body if stop is None else body[:stop])
            if trouble.stall is not None:
                self.served.closing.wait()
        except OSError:  # the reader has what it wants and left
            self.close_connection = True
        if stop is not None:
            self.close_connection = True

    def _write(self, body: bytes) -> None:
        for start in range(0, len(body), 2**16):
            self.wfile.write(body[start : start + 2**16])
            self.served.sent += len(body[start : start + 2**16])


@contextmanager
def serving(served: Served) -> Iterator[Served]:
    """Serve until the block ends."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"served": served}))
    server.daemon_threads = True
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    served.address = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield served
    finally:
        served.closing.set()
        server.shutdown()
        server.server_close()
        thread.join()
