"""A model hub on this machine: what huggingface_hub asks a hub for, and whatever a hub may do wrong."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Repository:
    """Files by path; announced: what the hub says that they are, where it lies."""

    files: dict[str, bytes]
    commit: str = COMMIT
    revisions: tuple[str, ...] = ("main",)
    announced: dict[str, bytes] = field(default_factory=dict)
    status: int = 200
    error_code: str = ""


@dataclass
class StandInHub:
    repositories: dict[str, Repository] = field(default_factory=dict)
    files_elsewhere: str = ""  # address of another host, to which large files are redirected
    ranges: bool = True
    break_off_after: list[int] = field(default_factory=list)  # bytes sent by the first answers; later ones are whole
    announces_what_it_sends: bool = False  # an answer that breaks off says so beforehand
    hold: threading.Event | None = None
    raw_answer: bytes = b""  # instead of any other
    asked: list[tuple[str, str, str | None]] = field(default_factory=list)  # method, path, Range
    tokens: list[tuple[str, str | None]] = field(default_factory=list)  # path, Authorization

    def fetched(self) -> list[str]:
        """Files that were asked for with GET, in order."""
        return [path.rpartition("/")[2] for method, path, _ in self.asked if method == "GET" and "/resolve/" in path]


def is_large(name: str) -> bool:
    return name.endswith((".gguf", ".safetensors", ".bin"))


def git_hash(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@contextmanager
def running(hub: StandInHub) -> Iterator[str]:
    """The hub's address while it runs."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(hub))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _handler(hub: StandInHub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self.answer()

        def do_GET(self) -> None:
            self.answer()

        def answer(self) -> None:
            path = unquote(urlsplit(self.path).path)
            hub.asked.append((self.command, path, self.headers.get("Range")))
            hub.tokens.append((path, self.headers.get("Authorization")))
            if hub.hold is not None:
                hub.hold.wait(20)
            if hub.raw_answer:
                self.wfile.write(hub.raw_answer)
                self.close_connection = True
            elif path.startswith("/api/models/"):
                name, _, revision = path.removeprefix("/api/models/").partition("/revision/")
                self.model_info(name, revision)
            elif "/resolve/" in path:
                name, _, rest = path.strip("/").partition("/resolve/")
                revision, _, file = rest.partition("/")
                self.file(name, revision, file)
            else:
                self.fail(404, "")

        def repository(self, name: str, revision: str) -> Repository | None:
            repository = hub.repositories.get(name)
            if repository is None:
                self.fail(401, "RepoNotFound")
            elif repository.status != 200:
                self.fail(repository.status, repository.error_code)
            elif revision not in (repository.commit, *repository.revisions):
                self.fail(404, "RevisionNotFound")
            else:
                return repository
            return None

        def model_info(self, name: str, revision: str) -> None:
            if (repository := self.repository(name, revision)) is not None:
                siblings = []
                for file, content in (repository.files | repository.announced).items():
                    sibling: dict[str, Any] = {"rfilename": file, "size": len(content), "blobId": git_hash(content)}
                    if is_large(file):
                        digest = hashlib.sha256(content).hexdigest()
                        sibling["lfs"] = {"size": len(content), "sha256": digest, "pointerSize": 130}
                    siblings.append(sibling)
                self.json({"_id": "1", "id": name, "modelId": name, "sha": repository.commit, "siblings": siblings})

        def file(self, name: str, revision: str, file: str) -> None:
            repository = self.repository(name, revision)
            if repository is None:
                return
            if file not in repository.files:
                self.fail(404, "EntryNotFound")
                return
            announced, content = repository.announced.get(file, repository.files[file]), repository.files[file]
            etag = hashlib.sha256(announced).hexdigest() if is_large(file) else git_hash(announced)
            headers = {"X-Repo-Commit": repository.commit, "ETag": f'"{etag}"', "Accept-Ranges": "bytes"}
            if is_large(file):
                headers |= {"X-Linked-Etag": f'"{etag}"', "X-Linked-Size": str(len(announced))}
            if is_large(file) and hub.files_elsewhere:
                self.send(302, headers | {"Location": f"{hub.files_elsewhere}{self.path}"}, b"")
                return
            start, status, span = 0, 200, self.headers.get("Range")
            if span and hub.ranges:
                start, status = int(span.removeprefix("bytes=").rstrip("-")), 206
                headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
            self.send(status, headers, content[start:])

        def json(self, value: object) -> None:
            self.send(200, {"Content-Type": "application/json"}, json.dumps(value).encode())

        def fail(self, status: int, code: str) -> None:
            self.send(status, {"X-Error-Code": code} if code else {}, b"")

        def send(self, status: int, headers: dict[str, str], body: bytes) -> None:
            sent = body
            if self.command == "GET" and status in (200, 206) and "X-Repo-Commit" in headers and hub.break_off_after:
                sent = body[: hub.break_off_after.pop(0)]
            announced = len(sent) if hub.announces_what_it_sends else len(body)
            self.send_response(status)
            self.send_header("X-HF-Warning", "advice; You should buy something")
            for name, value in (headers | {"Content-Length": str(announced)}).items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(sent)
                self.close_connection |= len(sent) < announced

        def log_message(self, *_: Any) -> None:
            pass

    return Handler
