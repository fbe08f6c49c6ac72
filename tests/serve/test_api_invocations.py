"""One path for every kind of body."""

from __future__ import annotations

from tests.serve.running import CHAT, COMPLETIONS, RunningServer

PARAMS = {"max_tokens": 4, "temperature": 0}


def test_the_fields_of_a_body_say_what_it_asks_for(tiny_server: RunningServer) -> None:
    messages = [{"role": "user", "content": "abc"}]
    bodies = {CHAT: {"messages": messages, **PARAMS}, COMPLETIONS: {"prompt": "a", **PARAMS}}
    with tiny_server.http() as client:
        for path, body in bodies.items():
            expected, document = (client.post(url, json=body).json() for url in (path, "/invocations"))
            assert document["choices"] == expected["choices"] and document.keys() == expected.keys()
        assert client.post("/invocations", json={"text": "a"}).status_code == 400
        assert client.post("/invocations", json={"messages": "a"}).json()["error"]["param"] == "messages"
