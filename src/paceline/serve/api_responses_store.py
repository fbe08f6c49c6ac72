"""Responses that are kept in memory, so that a client can continue from one, read it again or delete it."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass, field

from paceline.serve.api_shape import Json, as_text
from paceline.serve.errors import ApiError

MAX_RESPONSES = 4096
MAX_CHARACTERS = 64 << 20  # of the JSON of all of them


@dataclass(slots=True)
class StoredResponse:
    """One response.

    owner      the API key that it belongs to: no other key sees it
    inputs     the items of its own request
    history    all items of the conversation up to and with its output
    work       what still generates it, where it runs in the background
    """

    owner: str
    document: Json
    inputs: list[Json]
    history: list[Json] = field(default_factory=list)
    work: asyncio.Task[None] | None = None

    @property
    def size(self) -> int:
        """Its share of the limit. A conversation counts with each of its responses, so the limit is never passed.

        One that has not finished has no history yet, and its inputs count instead, which are part of it.
        """
        return len(as_text(self.document)) + sum(len(as_text(item)) for item in self.history or self.inputs)


class ResponseStore:
    """The latest responses, by id. The least recently used ones go when there are too many."""

    def __init__(self, max_responses: int = MAX_RESPONSES, max_characters: int = MAX_CHARACTERS) -> None:
        self._max_responses, self._max_characters = max_responses, max_characters
        self._responses: OrderedDict[str, StoredResponse] = OrderedDict()
        self._sizes: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._responses)

    def put(self, response: StoredResponse) -> None:
        """Keep a response, or a later state of it."""
        response_id = response.document["id"]
        self._responses[response_id] = response
        self._responses.move_to_end(response_id)
        self._sizes[response_id] = response.size
        while len(self._responses) > self._max_responses or sum(self._sizes.values()) > self._max_characters:
            self._drop(next(iter(self._responses)))

    def update(self, response: StoredResponse) -> None:
        """Keep a later state of a response, unless it has gone meanwhile."""
        if response.document["id"] in self._responses:
            self.put(response)

    def get(self, response_id: str, owner: str, param: str | None = None) -> StoredResponse:
        """Raises ApiError 404 for one that is not here, or belongs to another key."""
        response = self._responses.get(response_id)
        if response is None or response.owner != owner:
            message = f"Response with id {response_id[:80]!r} not found."
            raise ApiError(404, message, param=param, code="previous_response_not_found" if param else "not_found")
        self._responses.move_to_end(response_id)
        return response

    def delete(self, response_id: str, owner: str) -> None:
        self.get(response_id, owner)
        self._drop(response_id)

    def _drop(self, response_id: str) -> None:
        del self._sizes[response_id]
        work = self._responses.pop(response_id).work
        if work is not None:
            work.cancel()
