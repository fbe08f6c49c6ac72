"""Who is next: by priority, then one sequence of each API key in turn."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AsyncExitStack, contextmanager
from typing import Any

import httpx
import pytest

from paceline.serve.config import NetworkConfig, ServerConfig
from paceline.serve.fair_queue import FairQueue
from tests.serve.gated_engine import GatedEngine
from tests.serve.running import COMPLETIONS, NAME, RunningServer, serving

KEYS = {"a": "the key of client a", "b": "the key of client b", "c": "the key of client c"}


@contextmanager
def gated_server(max_num_seqs: int = 1) -> Iterator[tuple[RunningServer, GatedEngine]]:
    engine, network = GatedEngine(), NetworkConfig(api_keys=tuple(KEYS.values()))
    config = ServerConfig((NAME,), network=network, max_num_seqs=max_num_seqs)
    with serving(engine, config) as server:
        try:
            yield server, engine
        finally:
            engine.opened.set()


def wait_for(server: RunningServer, engine: GatedEngine, running: int, waiting: int) -> None:
    """Until so many sequences run and so many wait, as /health counts them."""
    deadline, client = time.monotonic() + 60, server.http()
    while len(engine.requests) < running or client.get("/health").json()["waiting"] != waiting:
        assert time.monotonic() < deadline
        time.sleep(0.005)


class Clients:
    """Send completions one after the other, each once the one before has reached the engine or its queue."""

    def __init__(self, server: RunningServer, engine: GatedEngine, pool: ThreadPoolExecutor) -> None:
        self._server, self._engine, self._pool = server, engine, pool
        self._num_sent = 0

    def send(self, client: str, prompt: str, **fields: Any) -> Future[httpx.Response]:
        headers = {"Authorization": f"Bearer {KEYS[client]}"}
        body = {"prompt": prompt, **fields}
        reply = self._pool.submit(lambda: self._server.http(**headers).post(COMPLETIONS, json=body))
        self._num_sent += 1
        wait_for(self._server, self._engine, 1, self._num_sent - 1)
        return reply


@pytest.mark.slow
def test_waiting_requests_are_admitted_by_priority_and_in_turn_over_the_keys() -> None:
    with gated_server() as (server, engine), ThreadPoolExecutor(10) as pool:
        clients = Clients(server, engine, pool)
        replies = [clients.send("a", f"a{index}") for index in range(4)]
        replies += [clients.send("b", "b0", stream=True), clients.send("b", "b1")]
        replies += [clients.send("c", "later", priority=7), clients.send("c", "sooner", priority=-1)]
        engine.opened.set()
        assert [reply.result(60).status_code for reply in replies] == [200] * 8
        assert engine.prompts == ["a0", "sooner", "a1", "b0", "a2", "b1", "a3", "later"]
        assert [request.priority for request in engine.requests] == [0, -1, 0, 0, 0, 0, 0, 7]
        assert server.http().get("/health").json()["waiting"] == 0


@pytest.mark.slow
def test_the_choices_of_one_request_take_turns_with_other_clients() -> None:
    with gated_server() as (server, engine), ThreadPoolExecutor(3) as pool:
        clients = Clients(server, engine, pool)
        blocker = clients.send("a", "aa")
        headers = {"Authorization": f"Bearer {KEYS['b']}"}
        many = pool.submit(lambda: server.http(**headers).post(COMPLETIONS, json={"prompt": "bb", "n": 3}))
        wait_for(server, engine, 1, 3)
        headers_c = {"Authorization": f"Bearer {KEYS['c']}"}
        other = pool.submit(lambda: server.http(**headers_c).post(COMPLETIONS, json={"prompt": "cc"}))
        wait_for(server, engine, 1, 4)
        engine.opened.set()
        assert [reply.result(60).status_code for reply in (blocker, many, other)] == [200] * 3
        assert engine.prompts == ["aa", "bb", "cc", "bb", "bb"]


def raw_request(key: str, body: str) -> bytes:
    headers = f"Host: localhost\r\nAuthorization: Bearer {key}\r\nContent-Type: application/json\r\n"
    return f"POST {COMPLETIONS} HTTP/1.1\r\n{headers}Content-Length: {len(body)}\r\n\r\n{body}".encode()


@pytest.mark.slow
def test_a_client_that_leaves_while_it_waits_loses_its_turn_and_no_other() -> None:
    with gated_server() as (server, engine), ThreadPoolExecutor(3) as pool:
        clients = Clients(server, engine, pool)
        replies = [clients.send("a", "aa")]
        with socket.create_connection(("127.0.0.1", server.port)) as impatient:
            impatient.sendall(raw_request(KEYS["b"], '{"prompt": "gone"}'))
            wait_for(server, engine, 1, 1)
        wait_for(server, engine, 1, 0)
        replies.append(clients.send("c", "cc"))
        engine.opened.set()
        assert [reply.result(60).status_code for reply in replies] == [200, 200]
        assert engine.prompts == ["aa", "cc"]


@pytest.mark.slow
@pytest.mark.parametrize("priority", ["high", 1.5, 1 << 40])
def test_a_priority_is_a_whole_number(priority: Any) -> None:
    with gated_server() as (server, engine):
        engine.opened.set()
        response = server.http(Authorization=f"Bearer {KEYS['a']}").post(
            COMPLETIONS, json={"prompt": "ab", "priority": priority}
        )
        assert response.status_code == 400 and "priority" in response.json()["error"]["message"]


# --- the queue alone --------------------------------------------------------------------------------------------------


async def order_of(queue: FairQueue, turns: list[tuple[str, int]], cancelled: tuple[int, ...] = ()) -> list[int]:
    """The order in which waiting turns come. Those cancelled are given up before the first comes."""
    order: list[int] = []

    async def wait(index: int, key: str, priority: int) -> None:
        async with queue.turn(key, priority):
            order.append(index)

    async with AsyncExitStack() as holder:
        await holder.enter_async_context(queue.turn("holder"))
        tasks = [asyncio.create_task(wait(index, *turn)) for index, turn in enumerate(turns)]
        await asyncio.sleep(0)
        assert queue.num_waiting == len(turns)
        for index in cancelled:
            tasks[index].cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert queue.num_waiting == len(turns) - len(cancelled)
    await asyncio.gather(*tasks, return_exceptions=True)
    assert queue.num_waiting == 0
    return order


def test_turns_that_are_given_up_leave_nothing_behind() -> None:
    queue = FairQueue(1)
    turns = [("a", 0), ("a", 0), ("b", 0), ("a", 3)]
    assert asyncio.run(order_of(queue, turns, cancelled=(0, 2))) == [1, 3]
    assert asyncio.run(order_of(queue, turns, cancelled=(3,))) == [0, 2, 1]
    assert queue._waiting == {} and queue._num_running == 0


def test_a_turn_that_comes_together_with_its_cancellation_is_passed_on() -> None:
    async def work() -> None:
        queue = FairQueue(1)

        async def hold() -> None:
            async with queue.turn("a"):
                await asyncio.sleep(3600)

        holder, second = asyncio.create_task(hold()), asyncio.create_task(hold())
        await asyncio.sleep(0)
        holder.cancel()
        await asyncio.gather(holder, return_exceptions=True)
        second.cancel()  # its turn has come, and it has not run yet
        await asyncio.gather(second, return_exceptions=True)
        async with asyncio.timeout(60), queue.turn("b"):
            pass

    asyncio.run(work())


def test_as_many_run_as_the_engine_runs() -> None:
    async def work() -> int:
        queue, most, running = FairQueue(3), 0, 0

        async def run(key: str) -> None:
            nonlocal most, running
            async with queue.turn(key):
                running += 1
                most = max(most, running)
                await asyncio.sleep(0)
                running -= 1

        await asyncio.gather(*(run(f"key {index % 4}") for index in range(20)))
        return most

    assert asyncio.run(work()) == 3
