"""Seeds of generated data: a wide mix, the same for the same seed, formatted as the model's own conversations."""

from __future__ import annotations

import ast
import itertools
import sysconfig
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.train import library_texts, prompt_tasks
from paceline.train.collect import CollectOptions, PromptPlanner, before_turn, length_buckets
from paceline.train.corpus import DOMAINS
from paceline.train.library_texts import LibraryTexts, library
from paceline.train.seed_makers import Seed
from paceline.train.seeds import LONG, MAKERS, SHORT, Mix, SeedStream
from tests.support.tiny import byte_tokenizer

COUNT = 3000
LIBRARY_FILES = ("argparse.py", "json/decoder.py", "email/message.py", "mailbox.py", "tarfile.py", "csv.py")
KINDS = set(SHORT.shares) | set(LONG.shares)


@pytest.fixture(scope="module", autouse=True)
def small_library() -> Iterator[None]:
    """Some files of the library: reading all of it takes seconds."""
    root = Path(sysconfig.get_path("stdlib"))
    library.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library_texts, "_library_files", lambda: (root / name for name in LIBRARY_FILES))
        yield
    library.cache_clear()


def seeds(mix: Mix, number: int, count: int) -> list[Seed]:
    return list(itertools.islice(SeedStream(mix, number), count))


def only(kind: str, count: int = 60) -> list[Seed]:
    return seeds(Mix({kind: 1.0}, raw_share=0.0), 5, count)


def test_a_seed_decides_all_prompts() -> None:
    assert seeds(SHORT, 4, 200) == seeds(SHORT, 4, 200) != seeds(SHORT, 5, 200)
    assert seeds(LONG, 4, 50) == seeds(LONG, 4, 50)


@pytest.mark.slow
def test_every_kind_is_in_the_mix_and_comes_in_its_share() -> None:
    """3000 draws: a share is off by more than 0.03 with probability below 1e-3 for each kind."""
    assert set(MAKERS) == KINDS
    for mix in (SHORT, LONG):
        assert sum(mix.shares.values()) == pytest.approx(1.0)
        domains = Counter(seed.domain for seed in seeds(mix, 0, COUNT))
        shares = Counter({kind: share for kind, share in mix.shares.items() if kind != "topic"})
        shares["chat"] += mix.shares.get("topic", 0.0)
        assert all(abs(domains[kind] / COUNT - share) < 0.03 for kind, share in shares.items())
        assert set(domains) <= set(DOMAINS)


def test_no_two_of_many_tasks_are_alike() -> None:
    for kind in ("translation", "retrieval", "turns", "math"):
        texts = {(seed.history, seed.text) for seed in only(kind, 200)}
        assert len(texts) > 120, kind


def test_a_translation_names_its_language() -> None:
    assert all(any(name in seed.text for name in prompt_tasks.LANGUAGES) for seed in only("translation"))


def test_a_retrieval_prompt_holds_passages_before_its_question() -> None:
    for seed in only("retrieval"):
        assert len(seed.text) > 150
        assert any(seed.text.rstrip().endswith(question) for question in prompt_tasks.PASSAGE_QUESTIONS)
        assert seed.open is not seed.text.endswith("?"), "an unfinished question is for the target to end"


def test_an_edit_holds_a_whole_function() -> None:
    for seed in only("edit"):
        code = seed.text.partition("```python\n")[2].rstrip("`") or seed.text.partition("\n\n")[2]
        assert any(isinstance(node, ast.FunctionDef) for node in ast.walk(ast.parse(code)))


def test_sums_have_fresh_numbers() -> None:
    closed = [seed for seed in only("math") if not seed.open]
    assert all(any(letter.isdigit() for letter in seed.text) for seed in closed)
    assert not any("{" in seed.text for seed in closed)


def test_other_languages_are_several() -> None:
    openings = {seed.text for seed in only("language", 200)}
    assert sum(any(text in openings for text in texts) for texts in prompt_tasks.LANGUAGE_OPENINGS.values()) >= 6


def test_without_the_sources_of_python_every_kind_is_still_made(monkeypatch: pytest.MonkeyPatch) -> None:
    library.cache_clear()
    monkeypatch.setattr(library_texts, "_library_files", lambda: iter(()))
    try:
        assert library() == LibraryTexts((), (), (), ())
        assert all(only(kind, 20) for kind in MAKERS)
    finally:
        library.cache_clear()


def planner() -> PromptPlanner:
    (bucket,) = length_buckets(CollectOptions(max_seq_len=432), 4)
    return PromptPlanner(byte_tokenizer(), bucket, 0)


def text_of(tokenizer: Any, ids: tuple[int, ...]) -> str:
    return str(tokenizer.decode(list(ids)))


def test_earlier_turns_stand_in_the_prompt_as_the_template_writes_them() -> None:
    tokenizer = byte_tokenizer()
    seed = Seed("turns", "Why", open=True, history=("Who?", "A dog."))
    plan = planner().plan(seed)
    assert plan is not None
    messages = [("user", "Who?"), ("assistant", "A dog."), ("user", "Why")]
    formatted = tokenizer.apply_chat_template(
        [{"role": role, "content": content} for role, content in messages], add_generation_prompt=True, tokenize=False
    )
    written = text_of(tokenizer, plan.prompt)
    assert formatted.startswith(written) and written.endswith("Why")
    assert before_turn(tokenizer, ("Who?", "A dog.")) + "Why" == written
    assert formatted == written + text_of(tokenizer, plan.bridge)
