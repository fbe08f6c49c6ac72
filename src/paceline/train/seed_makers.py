"""Makers of the plain kinds of seeds: questions, sums, Python functions, passages, raw texts."""

from __future__ import annotations

import random
from dataclasses import dataclass

from paceline.train import prompt_openings
from paceline.train.library_texts import library

COMPLETE = "Complete this Python function:\n"


@dataclass(frozen=True, slots=True)
class Seed:
    """The first part of a sequence.

    open        the target continues the question; otherwise the question is complete and is answered at once
    chat        formatted as a user's turn; otherwise raw text, which the target simply continues
    min_tokens  an open question does not end before this many tokens
    history     earlier turns of the conversation: a user's, an assistant's, and so on
    """

    domain: str
    text: str
    open: bool
    chat: bool = True
    min_tokens: int = 0
    history: tuple[str, ...] = ()


def chat(rng: random.Random) -> Seed:
    """An empty user's turn, in most cases with its first prompt_openings."""
    opening = rng.choice(prompt_openings.CHAT_OPENINGS) if rng.random() < 0.75 else ""
    return Seed("chat", opening, open=True)


def mathematics(rng: random.Random) -> Seed:
    if rng.random() < 0.25:
        return Seed("math", rng.choice(prompt_openings.MATH_OPENINGS), open=True)
    question = story(rng)
    return Seed("math", question[0].upper() + question[1:], open=False)


def story(rng: random.Random) -> str:
    """A word problem with fresh names and numbers."""
    first, second = rng.sample(prompt_openings.PEOPLE, 2)
    numbers = {"x": rng.randint(12, 240), "y": rng.randint(2, 20), "z": rng.randint(3, 40)}
    words = {"t": rng.choice(prompt_openings.THINGS), "p": rng.choice(prompt_openings.PLACES)}
    return rng.choice(prompt_openings.STORIES).format(a=first, b=second, **words, **numbers)


def code(rng: random.Random) -> Seed:
    chance = rng.random()
    if chance < 0.25:
        return Seed("code", rng.choice(prompt_openings.CODE_OPENINGS), open=True)
    lead = rng.choice((COMPLETE, COMPLETE, "", "Finish this code:\n"))
    functions = library().functions
    if chance < 0.55 and functions:
        return Seed("code", lead + rng.choice(functions), open=False)
    return Seed("code", lead + _invented_function(rng), open=False)


def _invented_function(rng: random.Random) -> str:
    """A signature with a docstring and an example or two, of a function that does not exist."""
    verb, noun = rng.choice(prompt_openings.CODE_VERBS), rng.choice(prompt_openings.CODE_NOUNS)
    rule = rng.choice(prompt_openings.CODE_RULES)
    arguments, result = rng.choice(prompt_openings.CODE_SHAPES)
    name = f"{verb}_{noun}"
    lines = [f"def {name}({arguments})" + (f" -> {result}:" if result else ":")]
    quotes = rng.choice(('"""', '"""', "'''"))
    lines.append(f"    {quotes} {verb.capitalize()} the {noun} {rule}.")
    for _ in range(rng.randint(0, 3)):
        values = ", ".join(rng.choice(prompt_openings.SAMPLES[_annotation(part)]) for part in arguments.split(", "))
        lines += [f"    >>> {name}({values})", f"    {rng.choice(prompt_openings.SAMPLES[result])}"]
    lines.append(f"    {quotes}\n")
    needs_typing = "List" in arguments + result
    return ("from typing import List\n\n\n" if needs_typing else "") + "\n".join(lines)


def _annotation(argument: str) -> str:
    return argument.split(": ")[1] if ": " in argument else ""


def summary(rng: random.Random) -> Seed:
    """A passage to summarize: half of them prose from the library, half invented by the target."""
    request, prose = rng.choice(prompt_openings.SUMMARY_REQUESTS), library().prose
    if prose and rng.random() < 0.55:
        return Seed("summarize", request + rng.choice(prose), open=False)
    return Seed(
        "summarize", request + rng.choice(prompt_openings.PASSAGE_OPENINGS), open=True, min_tokens=rng.randint(120, 420)
    )


def raw_text(rng: random.Random) -> Seed:
    return Seed("text", rng.choice(prompt_openings.RAW_OPENINGS), open=True, chat=False, min_tokens=rng.randint(4, 60))
