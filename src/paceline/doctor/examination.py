"""What a scenario works with: the server, how much to ask, a source of prompts, and its checks."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Iterable
from dataclasses import dataclass
from typing import Any

from paceline.doctor.check import Check, Exchange
from paceline.doctor.client import RequestFailed, RequestRefused, ServerClient
from paceline.doctor.effort import Effort
from paceline.doctor.query import Query, chat, completion
from paceline.doctor.result import CheckResult, Fault
from paceline.doctor.server import TestedServer


@dataclass(frozen=True, slots=True)
class Variant:
    """Another way to get the same answer: speculation off, or a second server."""

    name: str
    client: ServerClient
    fields: dict[str, Any]


class Examination:
    """One scenario on one server. level: the false alarm probability it may spend in all."""

    def __init__(self, server: TestedServer, effort: Effort, rng: random.Random, level: float) -> None:
        self.server, self.effort, self.rng, self.level = server, effort, rng, level
        self._checks: list[Check] = []

    def check(self, name: str) -> Check:
        """A new check; the order of checks is that of the report."""
        check = Check(name, self.server.near_tie, self.server.drift_limit, self.level)
        self._checks.append(check)
        return check

    async def results(self) -> tuple[CheckResult, ...]:
        return tuple([await check.result() for check in self._checks])

    # --- requests -----------------------------------------------------------------------------------------------------

    def prompt(self, text: str, **fields: Any) -> Query:
        """A greedy request, as a chat where the server has chats."""
        fields = {"max_tokens": self.effort.tokens, **fields}
        if self.server.has_chat:
            return chat([{"role": "user", "content": text}], **fields)
        return completion(text, **fields)

    def continuation(self, text: str, **fields: Any) -> Query:
        """A greedy request that goes on with a text, without a chat template where that is possible."""
        fields = {"max_tokens": self.effort.tokens, **fields}
        return completion(text, **fields) if self.server.has_completions else self.prompt(text, **fields)

    async def primed(self, text: str, **fields: Any) -> Query:
        """A text that the model has gone on from before: a drafter finds that continuation, and the model likes it."""
        before = await self.ask(self.continuation(text))
        return self.continuation(f"{text}{before.answer.content}\n\n{text}", **fields)

    async def primed_chat(self, text: str, **fields: Any) -> Query:
        """The same as a chat, where the server has chats: the question is asked a second time."""
        if not self.server.has_chat:
            return await self.primed(text, **fields)
        question = {"role": "user", "content": text}
        before = await self.ask(self.prompt(text))
        reply = {"role": "assistant", "content": before.answer.text}
        return chat([question, reply, question], **{"max_tokens": self.effort.tokens, **fields})

    def chars(self, tokens: int | None = None) -> int:
        """Characters of a long prompt that fits."""
        return self.server.fitting(self.effort.chars, tokens or self.effort.tokens)

    async def ask(self, query: Query, client: ServerClient | None = None, *, stream: bool = False) -> Exchange:
        client = client or self.server.client
        answer = await (client.stream(query) if stream else client.ask(query))
        return Exchange(client, query.changed(stream=True) if stream else query, answer)

    async def ask_together(
        self, queries: Iterable[Query], at_a_time: int, client: ServerClient | None = None
    ) -> list[Exchange]:
        """All of them, so many at a time, every other one streamed. A request that fails cancels the others."""
        limit = asyncio.Semaphore(at_a_time)

        async def one(index: int, query: Query) -> Exchange:
            async with limit:
                return await self.ask(query, client, stream=bool(index % 2))

        tasks = [asyncio.create_task(one(index, query)) for index, query in enumerate(queries)]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()

    # --- comparisons --------------------------------------------------------------------------------------------------

    def variants(self) -> list[Variant]:
        """The ways this server and the second one offer."""
        engine, variants = self.server.engine, []
        if engine.off:
            variants.append(Variant("speculation off", self.server.client, dict(engine.off)))
        if self.server.against is not None:
            variants.append(Variant("the second server", self.server.against, {}))
        return variants

    def drafting(self, query: Query) -> Query:
        """The request, asking the server to report its draft tokens."""
        return query.changed(**self.server.engine.report)

    async def compare_variants(self, check: Check, queries: Iterable[Query]) -> int | None:
        """Ask each query as it is and in every variant. Returns the draft tokens of the former, where they are known.

        A first request reads the prompt into the prefix cache, so that only speculation differs afterwards.
        """
        drafted: int | None = None
        variants = self.variants()
        if not variants:
            check.missing("no way to turn speculation off; name a second server with --against")
            return None
        for query in queries:
            await self.ask(query.changed(max_tokens=1))
            tested = await self.ask(self.drafting(query))
            if tested.answer.usage.drafted is not None:
                drafted = (drafted or 0) + tested.answer.usage.drafted
            plain = Exchange(tested.client, query, tested.answer)
            for variant in variants:
                other = await self.ask(query.changed(**variant.fields), variant.client)
                if other.answer.usage.drafted and variant.fields:
                    check.missing("the server drafts although it is asked not to")
                else:
                    await check.same(plain, other)
        return drafted

    async def guarded(self, check: Check, work: Awaitable[None]) -> None:
        """Await a part of a scenario. What the server refuses is not shown; what breaks it is a fault."""
        try:
            await work
        except RequestRefused as error:
            check.missing(str(error))
        except RequestFailed as error:
            check.faults.append(Fault(str(error), (self.server.client.curl(error.query),)))
