"""Responses that the server keeps, so that the next request names one instead of sending the conversation again."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cpuspec.server.errors import UnknownResponseError

_MOST_BYTES = 32 << 20


@dataclass(frozen=True)
class KeptResponse:
    """A response, and the items of its conversation: those of earlier responses, then its input. client: who may see it."""

    client: str
    response: dict[str, Any]
    items: list[dict[str, Any]]
    num_bytes: int


class KeptResponses:
    """The latest responses of one server, in memory."""

    def __init__(self, most_bytes: int = _MOST_BYTES) -> None:
        """most_bytes: of all, as JSON. One response takes at most a quarter."""
        self._most_bytes = most_bytes
        self._kept: dict[str, KeptResponse] = {}
        self._num_bytes = 0

    def keep(self, client: str, response: dict[str, Any], items: Sequence[dict[str, Any]]) -> None:
        """Keep a complete response. The oldest ones are forgotten where room is short; one that is too large is not kept."""
        size = len(json.dumps([response, items]))
        if size > self._most_bytes // 4:
            return
        self._kept[response["id"]] = KeptResponse(client, response, list(items), size)
        self._num_bytes += size
        while self._num_bytes > self._most_bytes:
            self._forget(next(iter(self._kept)))

    def get(self, client: str, response_id: str) -> KeptResponse:
        """A kept response. Raises UnknownResponseError."""
        found = self._kept.get(response_id)
        if found is None or found.client != client:
            raise UnknownResponseError(
                f"there is no response {response_id[:80]!r}; the latest ones are kept, in memory: send the whole conversation"
            )
        return found

    def conversation(self, client: str, response_id: str) -> list[dict[str, Any]]:
        """The items of a kept response's conversation, its output among them. Raises UnknownResponseError."""
        found = self.get(client, response_id)
        return [*found.items, *found.response["output"]]

    def delete(self, client: str, response_id: str) -> None:
        """Forget a response. Raises UnknownResponseError."""
        self.get(client, response_id)
        self._forget(response_id)

    def _forget(self, response_id: str) -> None:
        self._num_bytes -= self._kept.pop(response_id).num_bytes
