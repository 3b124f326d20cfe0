"""The stored responses. A request may name one as `previous_response_id` instead of sending the conversation again."""

from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from cpuspec.server.errors import NotFoundError

_MOST_BYTES = 32 << 20


@dataclass(frozen=True)
class StoredResponse:
    """A response with the items of its conversation: those of earlier responses, then its input. owner: see `Server.owner`."""

    owner: str
    response: dict[str, Any]
    items: list[dict[str, Any]]
    num_bytes: int


class ResponseStore:
    """The latest responses of one server, in memory."""

    def __init__(self, most_bytes: int = _MOST_BYTES) -> None:
        """most_bytes: the limit for all responses. One response takes at most a quarter."""
        self._most_bytes = most_bytes
        self._stored: dict[str, StoredResponse] = {}
        self._num_bytes = 0

    def store(self, owner: str, response: dict[str, Any], items: list[dict[str, Any]], num_bytes: int) -> None:
        """Store a complete response. The oldest are forgotten where memory is short; one that is too large is not stored.

        num_bytes: of the response and the items.
        """
        items = [{**one, "id": one.get("id") or f"item_{uuid4().hex}", "type": one.get("type") or "message"} for one in items]
        if response["id"] in self._stored:
            self._forget(response["id"])
        if num_bytes > self._most_bytes // 4:
            return
        self._stored[response["id"]] = StoredResponse(owner, response, items, num_bytes)
        self._num_bytes += num_bytes
        while self._num_bytes > self._most_bytes:
            self._forget(next(iter(self._stored)))

    def get(self, owner: str, response_id: str) -> StoredResponse:
        """A stored response. Raises NotFoundError."""
        found = self._stored.get(response_id)
        if found is None or found.owner != owner:
            raise _absent("response", response_id, "send the whole conversation")
        return found

    def item(self, owner: str, given: dict[str, Any]) -> dict[str, Any]:
        """The item itself, or the stored one that an item_reference names. Raises NotFoundError."""
        if given.get("type") != "item_reference" or not isinstance(wanted := given.get("id"), str):
            return given
        for one in reversed(self._stored.values()):
            for item in (*one.response["output"], *one.items) if one.owner == owner else ():
                if item.get("id") == wanted:
                    return item
        raise _absent("item", wanted, "send the item itself")

    def conversation(self, owner: str, response_id: str) -> list[dict[str, Any]]:
        """The items of a stored response's conversation, with its output. Raises NotFoundError."""
        found = self.get(owner, response_id)
        return [*found.items, *found.response["output"]]

    def delete(self, owner: str, response_id: str) -> None:
        """Forget a response. Raises NotFoundError."""
        self.get(owner, response_id)
        self._forget(response_id)

    def _forget(self, response_id: str) -> None:
        self._num_bytes -= self._stored.pop(response_id).num_bytes


def _absent(what: str, name: str, remedy: str) -> NotFoundError:
    message = f"there is no {what} {name[:80]!r}; the latest ones are kept, in memory: {remedy}"
    return NotFoundError(message, "previous_response_id", "previous_response_not_found")
