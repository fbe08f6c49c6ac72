"""A session as Claude Code holds it, through the anthropic client: system blocks, tools, betas, turns and streams."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from paceline.serve.config import NetworkConfig, ServerConfig
from tests.serve.running import CHAT, RunningServer, serving
from tests.serve.scripted import THINKING_TEMPLATE, TOOL_TEMPLATE, ScriptedEngine, tokenizer_with

pytestmark = pytest.mark.slow  # the client alone takes seconds to import

KEY, MODEL, SMALL_MODEL = "sk-ant-test", "claude-local", "claude-local-small"
BETAS = ["claude-code-20250219", "interleaved-thinking-2025-05-14", "context-management-2025-06-27"]
EPHEMERAL = {"type": "ephemeral", "ttl": "1h"}
TEXT_SCHEMA = {"type": "string", "description": "text"}


def tool(name: str, *required: str, **more: Any) -> dict[str, Any]:
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "properties": dict.fromkeys(required, TEXT_SCHEMA),
        "required": list(required),
        "additionalProperties": False,
    }
    return {"name": name, "description": f"{name} of the editor", "input_schema": schema, **more}


TOOLS = [
    tool("Read", "file_path"),
    tool("Grep", "pattern", type="custom"),
    tool("mcp__tracker__get_issue", "id", cache_control=EPHEMERAL),
]


def system_blocks(request: int) -> list[dict[str, Any]]:
    billing = f"x-anthropic-billing-header: cc_version=2.1.220.300; cc_entrypoint=cli; cch={request:05x};"
    return [
        {"type": "text", "text": billing},
        {"type": "text", "text": "You are Claude Code.", "cache_control": EPHEMERAL},
        {"type": "text", "text": "Working directory: /src/café", "cache_control": EPHEMERAL},
    ]


def call(name: str, **arguments: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@pytest.fixture(scope="module")
def shared_engine() -> ScriptedEngine:
    return ScriptedEngine(tokenizer_with(THINKING_TEMPLATE))


@pytest.fixture
def engine(shared_engine: ScriptedEngine) -> ScriptedEngine:
    shared_engine.requests, shared_engine.outputs = [], []
    return shared_engine


@pytest.fixture(scope="module")
def server(shared_engine: ScriptedEngine) -> Iterator[RunningServer]:
    config = ServerConfig((MODEL, SMALL_MODEL), network=NetworkConfig(api_keys=(KEY,)))
    with serving(shared_engine, config) as running:
        yield running


@dataclass
class Session:
    """What Claude Code sends: the whole conversation each time, the last user block marked for the cache."""

    client: Any
    messages: list[Any] = field(default_factory=list)
    num_requests: int = 0

    def fields(self) -> dict[str, Any]:
        return {
            "model": MODEL,
            "messages": self.messages,
            "system": system_blocks(self.num_requests),
            "tools": TOOLS,
            "thinking": {"type": "enabled", "budget_tokens": 1024},
        }

    def say(self, *blocks: dict[str, Any]) -> None:
        *others, last = blocks
        self.messages.append({"role": "user", "content": [*others, {**last, "cache_control": EPHEMERAL}]})

    def count(self) -> int:
        return int(self.client.beta.messages.count_tokens(**self.fields(), betas=BETAS).input_tokens)

    def answer(self) -> Any:
        """The streamed answer, which is sent back as it is with the next request."""
        expected = self.count()
        self.num_requests += 1
        with self.client.beta.messages.stream(
            **self.fields(),
            max_tokens=2048,
            betas=BETAS,
            metadata={"user_id": "user_1_account__session_2"},
            context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            extra_body={"temperature": 1, "output_config": {"effort": "medium"}},
        ) as events:
            start = next(event.message for event in events if event.type == "message_start")
            message = events.get_final_message()
        assert start.usage.input_tokens == expected, "the tokens that were counted before"
        usage = message.usage
        assert usage.input_tokens + usage.cache_read_input_tokens == expected and usage.output_tokens > 0
        self.messages.append({"role": "assistant", "content": message.content})
        return message


def result(block: Any, content: Any, **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": block.id, "content": content, **more}


def anthropic_package() -> Any:
    """Imported where it is used: it takes seconds, and every worker imports this file."""
    return pytest.importorskip("anthropic")


def anthropic_client(server: RunningServer) -> Any:
    return anthropic_package().Anthropic(base_url=server.url, api_key=KEY, max_retries=0, timeout=120)


@pytest.fixture
def session(server: RunningServer) -> Session:
    return Session(anthropic_client(server))


def test_a_session_reads_searches_and_answers(session: Session, engine: ScriptedEngine) -> None:
    engine.outputs = [
        "<think>\nI read it.\n</think>\n\nI look." + call("Read", file_path="/src/café/a.py"),
        call("Grep", pattern="def f") + call("mcp__tracker__get_issue", id="17"),
        "<think>\nDone.\n</think>\n\nIt is a function.",
    ]
    session.say({"type": "text", "text": "<system-reminder>Be brief.</system-reminder>"}, {"type": "text", "text": "?"})
    first = session.answer()
    assert [block.type for block in first.content] == ["thinking", "text", "tool_use"]
    assert first.stop_reason == "tool_use" and first.content[-1].input == {"file_path": "/src/café/a.py"}

    session.say(result(first.content[-1], [{"type": "text", "text": "1\tdef f(): ..."}]))
    second = session.answer()
    assert [block.name for block in second.content] == ["Grep", "mcp__tracker__get_issue"]
    assert len({block.id for block in second.content}) == 2

    grep, issue = second.content
    session.say(result(grep, "a.py:1"), result(issue, "no such issue", is_error=True), {"type": "text", "text": "So?"})
    third = session.answer()
    assert third.content[-1].text == "It is a function." and third.stop_reason == "end_turn"

    prompt = engine.prompts[-1]
    assert "<s>system: You are Claude Code.\n\nWorking directory: /src/café</s>" in prompt
    assert "<s>tool: 1\tdef f(): ...</s>" in prompt and "<s>tool: Error: no such issue</s><s>user: So?</s>" in prompt
    assert '"name": "Read", "arguments": {"file_path": "/src/café/a.py"}' in prompt
    assert all(f'"name": "{name["name"]}"' in prompt for name in TOOLS)


def test_what_changes_with_every_request_is_not_in_the_prompt(session: Session, engine: ScriptedEngine) -> None:
    """Else nothing of a session is ever found in the prefix cache."""
    engine.outputs = [call("Read", file_path="a"), "Yes."]
    session.say({"type": "text", "text": "?"})
    first = session.answer()
    session.say(result(first.content[0], "x"))
    session.answer()
    before, after = engine.prompts
    assert after.startswith(before.removesuffix("<s>assistant: ")) and "billing" not in after


def test_the_small_model_names_a_session_without_tools(session: Session, engine: ScriptedEngine) -> None:
    engine.outputs = ['{"title": "A file"}']
    schema = {"type": "object", "properties": {"title": TEXT_SCHEMA}, "required": ["title"]}
    message = session.client.beta.messages.create(
        model=SMALL_MODEL,
        max_tokens=512,
        system=system_blocks(0),
        messages=[{"role": "user", "content": [{"type": "text", "text": "Name it."}]}],
        tools=[],
        thinking={"type": "disabled"},
        betas=[*BETAS, "structured-outputs-2025-12-15"],
        extra_body={"output_config": {"format": {"type": "json_schema", "schema": schema}}},
    )
    assert json.loads(message.content[0].text) == {"title": "A file"} and message.model == SMALL_MODEL
    assert engine.requests[-1].structured_output is not None and engine.prompts[-1].endswith("<think>\n\n</think>\n\n")


def test_tools_of_anthropics_own_servers_are_refused_in_words(session: Session) -> None:
    search = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}
    messages = [{"role": "user", "content": "Search."}]
    with pytest.raises(anthropic_package().BadRequestError, match="the client's own tools only"):
        session.client.messages.create(model=MODEL, max_tokens=9, messages=messages, tools=[search])


STRICT_TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}"
    "{% if 'refused' in message.content %}{{ raise_exception('No.') }}{% endif %}{% endfor %}" + TOOL_TEMPLATE
)


def test_instructions_in_the_middle_reach_templates_that_take_them_at_the_start_alone() -> None:
    """Claude Code lists agents and skills in a message of the system after the user's first."""
    engine = ScriptedEngine(tokenizer_with(STRICT_TEMPLATE))
    engine.outputs = ["Yes."]
    billing = "x-anthropic-billing-header: cc_version=2.1.197; cch=00001;"
    with serving(engine, ServerConfig((MODEL,))) as running:
        client = anthropic_client(running)
        messages = [
            {"role": "user", "content": [{"type": "text", "text": "Hello"}]},
            {"role": "system", "content": [{"type": "text", "text": text} for text in (billing, "Agents: none")]},
            {"role": "system", "content": billing},
        ]
        answer = client.messages.create(model=MODEL, max_tokens=64, system="Be brief.", messages=messages)
        assert answer.content[0].text == "Yes."
        both = [{"role": "user", "content": "refused"}, {"role": "system", "content": "late"}]
        refused = running.http().post(CHAT, json={"messages": both})
        assert refused.status_code == 400 and "No." in refused.json()["error"]["message"]
    assert engine.prompts == ["<s>system: Be brief.</s><s>user: Hello\n\nAgents: none</s><s>assistant: "]


def test_messages_of_the_system_add_and_remove_tools(session: Session, engine: ScriptedEngine) -> None:
    def change(kind: str, **tool: Any) -> dict[str, Any]:
        return {"type": kind, "tool": tool}

    engine.outputs = ["Yes."]
    changes = [
        change("tool_removal", type="tool_reference", name="Grep"),
        change("tool_removal", type="tool_reference", name="Read"),
        change("tool_addition", type="tool_reference", name="Read"),
        change("tool_addition", type="tool_definition", definition=tool("Query", "sql")),
    ]
    messages = [
        {"role": "user", "content": "Hello"},
        {"role": "system", "content": [{"type": "text", "text": "Tools changed."}, *changes]},
    ]
    session.client.messages.create(model=MODEL, max_tokens=64, messages=messages, tools=TOOLS)
    offered = [name for name in ("Read", "Grep", "Query") if f'"name": "{name}"' in engine.prompts[-1]]
    assert offered == ["Read", "Query"] and "<s>system: Tools changed.</s>" in engine.prompts[-1]
    messages[1]["content"] = [change("tool_removal", type="tool_reference", name="missing")]
    with pytest.raises(anthropic_package().BadRequestError, match="declared in tools"):
        session.client.messages.create(model=MODEL, max_tokens=64, messages=messages, tools=TOOLS)


def test_a_search_for_tools_gives_their_names(session: Session, engine: ScriptedEngine) -> None:
    engine.outputs = [call("Read", file_path="a"), "Yes."]
    session.say({"type": "text", "text": "?"})
    block = session.answer().content[0]
    session.say(result(block, [{"type": "tool_reference", "tool_name": "Grep"}]))
    session.answer()
    assert "<s>tool: Grep</s>" in engine.prompts[-1]


@pytest.mark.skipif(shutil.which("claude") is None, reason="npm install -g @anthropic-ai/claude-code")
def test_claude_code_itself_reads_a_file_and_answers(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("def greet(): return 'hello from the file'")
    engine = ScriptedEngine(tokenizer_with(THINKING_TEMPLATE))
    engine.info = replace(engine.info, max_seq_len=1 << 20)  # its system prompt and tools are long
    engine.outputs = ["<think>\nI look.\n</think>" + call("Read", file_path=str(tmp_path / "a.py")), "It greets."]
    with serving(engine, ServerConfig((MODEL,), network=NetworkConfig(api_keys=(KEY,)))) as running:
        settings = {"ANTHROPIC_BASE_URL": running.url, "ANTHROPIC_API_KEY": KEY, "ANTHROPIC_MODEL": MODEL}
        settings |= {"HOME": str(tmp_path), "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"}
        command = ["claude", "-p", "What does a.py do?", "--output-format", "json", "--allowedTools", "Read"]
        output = subprocess.run(
            command,
            cwd=tmp_path,
            env={"PATH": os.environ["PATH"], **settings},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=300,
        )
    document = json.loads(output.stdout)
    assert (document["is_error"], document["num_turns"], document["result"]) == (False, 2, "It greets."), output.stderr
    assert "hello from the file" in engine.prompts[-1]
