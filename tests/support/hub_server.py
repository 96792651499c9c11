"""A small Hugging Face Hub on the loopback: files of repositories at revisions, and every way it can refuse."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Repo:
    """`revisions` maps a branch, tag or commit to its commit. `gated`: every file is refused so. `answers`: statuses
    given once each, before anything else is looked at, with their headers."""

    files: dict[str, bytes]
    revisions: dict[str, str] = field(default_factory=lambda: {"main": COMMIT, COMMIT: COMMIT})
    gated: int | None = None
    answers: list[tuple[int, dict[str, str]]] = field(default_factory=list)
    moved_to: str | None = None


@dataclass
class Hub:
    """What is served, and what was asked: (method, path) in order."""

    repos: dict[str, Repo] = field(default_factory=dict)
    asked: list[tuple[str, str]] = field(default_factory=list)
    tokens: list[str | None] = field(default_factory=list)
    address: str = ""


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    """Serve `hub` until the block ends."""

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self._answer(with_body=False)

        def do_GET(self) -> None:
            self._answer(with_body=True)

        def log_message(self, *args: object) -> None:
            pass

        def _answer(self, with_body: bool) -> None:
            path = unquote(urlsplit(self.path).path).lstrip("/")
            hub.asked.append((self.command, path))
            hub.tokens.append(self.headers.get("Authorization"))
            status, headers, body = _reply(hub, path)
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if with_body:
                self.wfile.write(body)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    hub.address = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _reply(hub: Hub, path: str) -> tuple[int, dict[str, str], bytes]:
    is_api = path.startswith("api/models/")
    owner, name, *rest = path.removeprefix("api/models/").split("/")
    repo = hub.repos.get(f"{owner}/{name}")
    if repo is None:
        return 404, {"X-Error-Code": "RepoNotFound"}, b""
    if repo.moved_to is not None:
        return 307, {"Location": "/" + path.replace(f"{owner}/{name}", repo.moved_to)}, b""
    if repo.answers:
        status, headers = repo.answers.pop(0)
        return status, headers, b""
    if repo.gated is not None:
        return repo.gated, {"X-Error-Code": "GatedRepo"}, b""
    commit = repo.revisions.get(rest[1] if len(rest) > 1 else "main")
    if commit is None:
        return 404, {"X-Error-Code": "RevisionNotFound"}, b""
    if is_api:
        return 200, {"Content-Type": "application/json"}, _listing(repo, commit, rest)
    file = repo.files.get("/".join(rest[2:]))
    if file is None:
        return 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit}, b""
    return 200, {"X-Repo-Commit": commit, "ETag": f'"{hashlib.sha1(file).hexdigest()}"'}, file


def _listing(repo: Repo, commit: str, rest: list[str]) -> bytes:
    if rest[:1] == ["tree"]:
        tree = [
            {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
            for name, data in repo.files.items()
        ]
        return json.dumps(tree).encode()
    return json.dumps({"id": "model", "sha": commit, "siblings": [{"rfilename": n} for n in repo.files]}).encode()
