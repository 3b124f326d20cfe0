"""The lines of a batch: requests in OpenAI's batch format, or plain objects with prompt or messages; and the answers' lines.

Source of the formats: OpenAI's API reference, "The request input object" and "The request output object" of a batch.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cpuspec.errors import CpuspecError, in_one_line
from cpuspec.server.errors import as_request_error

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MAX_LINE_BYTES = 64 << 20
_ID_KEY, _ID_BEGINS = "id", "batch_req_"
ANSWER_BEGINS = f'{{"{_ID_KEY}": "{_ID_BEGINS}'.encode()  # of every answer's line


class LineError(CpuspecError):
    """A line that is not a request. code: OpenAI's name for the fault."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class Line:
    """One line of a batch. number: counted from 1, empty lines left out. end: the byte of the file after it."""

    number: int
    content: bytes
    end: int

    @property
    def custom_id(self) -> str:
        """The id of its answer: its own `custom_id`, else one made of its number."""
        try:
            found = json.loads(self.content)["custom_id"]
        except (ValueError, LookupError, TypeError, RecursionError):
            found = None
        return found if isinstance(found, str) else f"line-{self.number}"

    def request(self) -> tuple[str, dict[str, Any]]:
        """Its endpoint, COMPLETIONS or CHAT, and its body. Raises LineError."""
        if len(self.content) > MAX_LINE_BYTES:
            raise LineError("invalid_json_line", f"the line has more than {MAX_LINE_BYTES} bytes")
        try:
            value = json.loads(self.content)
        except (ValueError, RecursionError) as error:
            raise LineError("invalid_json_line", f"the line is not JSON: {in_one_line(str(error))}") from None
        if not isinstance(value, dict):
            raise LineError("invalid_json_line", "the line is not a JSON object")
        if not {"body", "url", "method"} & value.keys():
            body = {name: one for name, one in value.items() if name != "custom_id"}
            if ("messages" in body) == ("prompt" in body):
                raise LineError("missing_required_parameter", "the line needs prompt or messages, one of them")
            return CHAT if "messages" in body else COMPLETIONS, body
        if not isinstance(value.get("custom_id"), str):
            raise LineError("missing_required_parameter", "the line has no custom_id, a text")
        if value.get("method", "POST") != "POST":
            raise LineError("invalid_method", f"method must be POST, got {in_one_line(repr(value['method']))}")
        if value.get("url") not in (COMPLETIONS, CHAT):
            raise LineError("invalid_url", f"url must be {COMPLETIONS} or {CHAT}, got {in_one_line(repr(value.get('url')))}")
        if not isinstance(value.get("body"), dict):
            raise LineError("missing_required_parameter", "the line has no body, an object")
        return value["url"], value["body"]


def read_lines(path: Path) -> Iterator[Line]:
    """Yield the lines of a file, which is never in memory as a whole. Raises OSError."""
    with path.open("rb") as file:
        number = 0
        while content := file.readline(MAX_LINE_BYTES + 1):
            whole = content
            while len(whole) > MAX_LINE_BYTES and not whole.endswith(b"\n") and whole:
                whole = file.readline(MAX_LINE_BYTES + 1)  # the rest of a line that is too long is skipped
            if content.strip():
                number += 1
                yield Line(number, content, file.tell())


def answer_line(line: Line, status: int, body: Mapping[str, Any]) -> dict[str, Any]:
    """The line that answers a request."""
    response = {"status_code": status, "request_id": f"req_{line.number}", "body": body}
    return {_ID_KEY: f"{_ID_BEGINS}{line.number}", "custom_id": line.custom_id, "response": response, "error": None}


def error_line(line: Line, error: CpuspecError) -> dict[str, Any]:
    """The answer to a line that cannot be run: the server's error. A line that is not a request gets only its fault."""
    if isinstance(error, LineError):
        fault = {"code": error.code, "message": str(error)}
        return {_ID_KEY: f"{_ID_BEGINS}{line.number}", "custom_id": line.custom_id, "response": None, "error": fault}
    found = as_request_error(error)
    return answer_line(line, found.status, {"error": {"message": str(found), "type": found.kind, "param": None, "code": None}})
