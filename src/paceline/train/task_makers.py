"""Makers of seeds that set the target a task: translate, answer from a passage, edit code, go on with a conversation.

They are composed of templates, of texts of the standard library and of what the target adds; no data set is used.
"""

from __future__ import annotations

import random

from paceline.train import prompt_openings, prompt_tasks
from paceline.train.library_texts import library
from paceline.train.seed_makers import Seed, story

MOST_PASSAGES, PASSAGE_CHARACTERS = 3, 900
FEW_ANSWER_SENTENCES = (1, 4)


def sentence(rng: random.Random) -> str:
    """A plain English sentence: composed of words, or one of the library's."""
    sentences = library().sentences
    if sentences and rng.random() < 0.3:
        return rng.choice(sentences)
    words = {name: rng.choice(values) for name, values in prompt_tasks.SENTENCE_WORDS.items()}
    return rng.choice(prompt_tasks.SENTENCES).format(**words, n=rng.randint(2, 90))


def translation(rng: random.Random) -> Seed:
    """Sentences to translate, or an opening of one that the target invents."""
    request = rng.choice(prompt_tasks.TRANSLATION_REQUESTS).format(language=rng.choice(prompt_tasks.LANGUAGES))
    if rng.random() < 0.35:
        return Seed("translation", request + rng.choice(prompt_tasks.SENTENCE_OPENINGS), open=True, min_tokens=6)
    return Seed("translation", request + " ".join(sentence(rng) for _ in range(rng.randint(1, 3))), open=False)


def fact_question(rng: random.Random) -> str:
    """A question about something that everyone has heard of."""
    kind = rng.choice(tuple(prompt_tasks.FACT_QUESTIONS))
    return rng.choice(prompt_tasks.FACT_QUESTIONS[kind]).format(rng.choice(prompt_tasks.ENTITIES[kind]))


def question(rng: random.Random) -> Seed:
    return Seed("question", rng.choice(prompt_tasks.ANSWER_STYLES) + fact_question(rng), open=False)


def retrieval(rng: random.Random) -> Seed:
    """Passages and a question about them, which the target ends."""
    passages = [_passage(rng) for _ in range(rng.randint(1, MOST_PASSAGES))]
    if len(passages) > 1:
        passages = [f"[{number}] {passage}" for number, passage in enumerate(passages, start=1)]
    frame = rng.choice(prompt_tasks.RETRIEVAL_FRAMES)
    text = frame.format(passages="\n\n".join(passages), question=rng.choice(prompt_tasks.PASSAGE_QUESTIONS))
    return Seed("retrieval", text, open=not text.rstrip().endswith("?"), min_tokens=3)


def _passage(rng: random.Random) -> str:
    """A piece of the library's prose, or some sentences in a row."""
    prose = library().prose
    if prose and rng.random() < 0.6:
        text = rng.choice(prose)
        first = rng.randrange(max(1, len(text) - PASSAGE_CHARACTERS))
        return text[first : first + PASSAGE_CHARACTERS].partition(" ")[2].rpartition(" ")[0] + " …"
    return " ".join(sentence(rng) for _ in range(rng.randint(3, 7)))


def edit(rng: random.Random) -> Seed:
    """A whole function and what is to be changed in it."""
    bodies = library().bodies
    request = rng.choice(prompt_tasks.EDIT_REQUESTS)
    if not bodies:
        return Seed("edit", request + "\ndef ", open=True, min_tokens=40)
    body = rng.choice(bodies)
    return Seed("edit", rng.choice((f"{request}\n\n{body}", f"{request}\n```python\n{body}```")), open=False)


def turns(rng: random.Random) -> Seed:
    """A conversation of several turns; the target invents the user's next one."""
    history: list[str] = []
    for _ in range(rng.randint(1, 2)):
        asked = rng.choice((fact_question, story, _request))(rng)
        history += [asked, _short_answer(rng)]
    return Seed("turns", rng.choice(prompt_tasks.FOLLOW_UPS), open=True, min_tokens=3, history=tuple(history))


def _request(rng: random.Random) -> str:
    return f"{rng.choice(prompt_tasks.CHAT_REQUESTS)} {rng.choice(prompt_tasks.TOPICS)}."


def _short_answer(rng: random.Random) -> str:
    """An assistant's earlier turn: it only has to look like one."""
    return " ".join(sentence(rng) for _ in range(rng.randint(*FEW_ANSWER_SENTENCES)))


def other_language(rng: random.Random) -> Seed:
    """A user's turn that begins in another language than English."""
    openings = prompt_tasks.LANGUAGE_OPENINGS[rng.choice(tuple(prompt_tasks.LANGUAGE_OPENINGS))]
    return Seed("language", rng.choice(openings), open=True, min_tokens=rng.randint(3, 12))


def topic(rng: random.Random) -> Seed:
    """A complete request about a topic, as users write them."""
    request = rng.choice((_request(rng), f"{rng.choice(prompt_openings.SUMMARY_REQUESTS)}{_passage(rng)}"))
    return Seed("chat", request, open=False)
