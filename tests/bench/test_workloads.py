from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from paceline.bench.workloads import DOMAINS, load_prompts
from paceline.errors import OptionError, PromptError


def written(folder: Path, name: str, content: str) -> str:
    path = folder / name
    path.write_text(content, encoding="utf-8")
    return str(path)


def test_the_built_in_set_has_twelve_different_prompts_of_every_domain() -> None:
    prompts = load_prompts("builtin")
    assert Counter(prompt.domain for prompt in prompts) == dict.fromkeys(DOMAINS, 12)
    assert len({prompt.text for prompt in prompts}) == 72
    assert not all(prompt.chat for prompt in prompts)


def test_some_domains_can_be_chosen_and_a_limit_is_spread_over_them() -> None:
    assert {prompt.domain for prompt in load_prompts("builtin:code,maths")} == {"code", "maths"}
    assert Counter(prompt.domain for prompt in load_prompts("builtin", 6)) == dict.fromkeys(DOMAINS, 1)
    assert len(load_prompts("builtin", 1000)) == 72


def test_spec_bench(tmp_path: Path) -> None:
    row = {"question_id": 81, "category": "writing", "turns": ["Compose a blog post.", "Rewrite it."]}
    (prompt,) = load_prompts(written(tmp_path, "q.jsonl", json.dumps(row) + "\n"))
    assert (prompt.domain, prompt.text, prompt.chat) == ("writing", "Compose a blog post.", True)


def test_human_eval(tmp_path: Path) -> None:
    row = {"task_id": "HumanEval/0", "prompt": "def f():\n", "canonical_solution": "    pass", "test": ""}
    (prompt,) = load_prompts(written(tmp_path, "h.jsonl", json.dumps(row)))
    assert (prompt.domain, prompt.text, prompt.chat) == ("code", "def f():\n", False)


def test_gsm8k(tmp_path: Path) -> None:
    rows = [{"question": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(3)]
    prompts = load_prompts(written(tmp_path, "g.jsonl", "\n".join(map(json.dumps, rows))))
    assert [prompt.text for prompt in prompts] == [row["question"] for row in rows]
    assert {prompt.domain for prompt in prompts} == {"maths"}


def test_own_prompts_as_jsonl_and_as_text(tmp_path: Path) -> None:
    rows = [{"prompt": "Say hi", "domain": "greetings", "kind": "chat"}]
    (own,) = load_prompts(written(tmp_path, "own.json", json.dumps(rows)))
    assert (own.domain, own.chat) == ("greetings", True)
    lines = load_prompts(written(tmp_path, "a.txt", "first\n\nsecond\n"))
    assert [prompt.text for prompt in lines] == ["first", "second"]
    blocks = load_prompts(written(tmp_path, "b.txt", "one\nmore of one\n---\ntwo\n"))
    assert [prompt.text for prompt in blocks] == ["one\nmore of one", "two"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("bad.jsonl", '{"prompt": "x"}\n{oops', "line 2 is not JSON"),
        ("list.jsonl", "[1, 2]", "entry 1"),
        ("other.jsonl", '{"text": "x"}', "none of the fields"),
        ("empty.txt", "\n\n", "holds no prompts"),
    ],
)
def test_files_that_hold_no_prompts_say_so(tmp_path: Path, name: str, content: str, message: str) -> None:
    with pytest.raises(PromptError, match=message):
        load_prompts(written(tmp_path, name, content))


def test_wrong_names_say_what_there_is(tmp_path: Path) -> None:
    with pytest.raises(PromptError, match="builtin"):
        load_prompts(str(tmp_path / "missing.txt"))
    with pytest.raises(OptionError, match="summarising"):
        load_prompts("builtin:poetry")
    with pytest.raises(OptionError, match="1 or more"):
        load_prompts("builtin", 0)
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PromptError, match="cannot be read"):
        load_prompts(str(tmp_path / "binary.txt"))
