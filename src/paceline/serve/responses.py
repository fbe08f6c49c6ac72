"""From pieces to OpenAI's replies and chunks."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, field
from typing import Any, Protocol

from paceline.core.stats import SpecStats
from paceline.core.types import RequestOutput, TokenLogprob
from paceline.hub.tokenizer import Tokenizer
from paceline.serve.requests import Choice, Job

Json = dict[str, Any]
LEAST_LOGPROB = -9999.0  # JSON has no minus infinity


@dataclass(slots=True)
class Written:
    """One choice as it grows."""

    choice: Choice
    text: str = ""
    tokens: int = 0
    from_draft: list[bool] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)  # of each token in the text
    finish_reason: str | None = None
    stats: SpecStats = field(default_factory=SpecStats)

    def add(self, output: RequestOutput) -> None:
        self.offsets += [len(self.text)] * len(output.token_ids)
        self.text += output.text
        self.tokens += len(output.token_ids)
        self.from_draft += [output.from_draft] * len(output.token_ids)
        self.logprobs += output.logprobs or ()
        self.finish_reason = output.finish_reason or self.finish_reason
        self.stats = output.stats or self.stats

    def figures(self) -> Json:
        """What x_paceline asks for."""
        return {"from_draft_tokens": [int(flag) for flag in self.from_draft], **self.stats.as_dict()}


def usage(job: Job, texts: list[Written]) -> Json:
    """Tokens counted; what a client's prediction brought is among the details."""
    written = sum(text.tokens for text in texts)
    predicted = [text.stats for text in texts if text.choice.request.prediction and not text.choice.request.method]
    accepted = sum(stats.accepted for stats in predicted)
    return {
        "prompt_tokens": job.prompt_tokens,
        "completion_tokens": written,
        "total_tokens": job.prompt_tokens + written,
        "completion_tokens_details": {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": sum(stats.drafted for stats in predicted) - accepted,
        },
    }


class TokenFormatter:
    """Tokens as the API shows them: a text, and the bytes it really stands for. End tokens are no part of an answer."""

    def __init__(self, tokenizer: Tokenizer, ends: frozenset[int]) -> None:
        self._tokenizer, self._ends = tokenizer.hf_tokenizer, ends
        self._special = frozenset(getattr(tokenizer.hf_tokenizer, "all_special_ids", ()))

    def text(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens))

    def shown(self, token: int) -> str:
        return str(self._tokenizer.decode([token]))

    def entry(self, token: int, logprob: float) -> Json:
        word = self.shown(token)
        return {"token": word, "logprob": max(logprob, LEAST_LOGPROB), "bytes": self._bytes(token, word)}

    def _bytes(self, token: int, word: str) -> list[int] | None:
        """The replacement sign stands for part of a character; the vocabulary's own spelling has the byte."""
        if token in self._special:
            return None  # no part of the text
        if "�" not in word:
            return list(word.encode("utf-8", "replace"))
        output = str(self._tokenizer.convert_ids_to_tokens(token))
        if output.startswith("<0x") and output.endswith(">"):
            return [int(output[3:-1], 16)]
        return [BYTES.get(response, 0xFF) for response in output]

    def chat(self, found: list[TokenLogprob]) -> Json:
        return {"content": [self._with_top(one) for one in found if one.token not in self._ends], "refusal": None}

    def _with_top(self, one: TokenLogprob) -> Json:
        entry = self.entry(one.token, one.logprob)
        entry["top_logprobs"] = [self.entry(token, logprob) for token, logprob in one.top]
        return entry

    def completion(self, found: list[TokenLogprob], offsets: list[int]) -> Json:
        found = [one for one in found if one.token not in self._ends]
        return {
            "tokens": [self.shown(one.token) for one in found],
            "token_logprobs": [max(one.logprob, LEAST_LOGPROB) for one in found],
            "top_logprobs": [
                {self.shown(token): max(logprob, LEAST_LOGPROB) for token, logprob in one.top} for one in found
            ],
            "text_offset": offsets[: len(found)],  # an end token can only be the last
        }


def _byte_letters() -> dict[str, int]:
    """Byte-level vocabularies spell printable bytes as themselves and the others as letters from U+0100 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


BYTES = _byte_letters()


class Form(Protocol):
    """How one of the two kinds of completion looks. `chunks` are choices of a stream, `choice` of a whole reply."""

    word: str  # what its id begins with
    whole: str  # its object
    part: str  # the object of a chunk

    def opening(self) -> Json: ...
    def chunk(self, text: Written, output: RequestOutput) -> Json: ...
    def closing(self) -> Json: ...
    def choice(self, text: Written) -> Json: ...


class ChatForm:
    """Messages."""

    word, whole, part = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, words: TokenFormatter) -> None:
        self._words = words

    def opening(self) -> Json:
        return {"delta": {"role": "assistant", "content": ""}, "logprobs": None}

    def chunk(self, text: Written, output: RequestOutput) -> Json:
        logprobs = None if output.logprobs is None else self._words.chat(list(output.logprobs))
        return {"delta": {"content": output.text}, "logprobs": logprobs}

    def closing(self) -> Json:
        return {"delta": {}, "logprobs": None}

    def choice(self, text: Written) -> Json:
        asked = text.choice.request.logprobs is not None
        message = {"role": "assistant", "content": text.text, "refusal": None}
        return {"message": message, "logprobs": self._words.chat(text.logprobs) if asked else None}


class CompletionForm:
    """Plain texts."""

    word, whole, part = "cmpl", "text_completion", "text_completion"

    def __init__(self, words: TokenFormatter) -> None:
        self._words = words

    def opening(self) -> Json:
        return {"text": "", "logprobs": None}

    def chunk(self, text: Written, output: RequestOutput) -> Json:
        logprobs = None
        if output.logprobs is not None:
            count = len(output.logprobs)
            logprobs = self._words.completion(list(output.logprobs), text.offsets[-count:] if count else [])
        return {"text": output.text, "logprobs": logprobs}

    def closing(self) -> Json:
        return {"text": "", "logprobs": None}

    def choice(self, text: Written) -> Json:
        asked = text.choice.request.logprobs is not None
        logprobs = self._words.completion(text.logprobs, text.offsets) if asked else None
        return {"text": text.choice.echo + text.text, "logprobs": logprobs}


class ResponseBuilder:
    """The reply to one request, whole or in chunks."""

    def __init__(self, form: Form, job: Job, model: str) -> None:
        self._form, self._job, self._model = form, job, model
        self.id = f"{form.word}-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self.figures = job.figures
        self.texts = [Written(choice) for choice in job.choices]

    def _head(self, kind: str) -> Json:
        return {"id": self.id, "object": kind, "created": self._created, "model": self._model}

    def whole(self) -> Json:
        """The reply when every text is written."""
        choices = []
        for index, text in enumerate(self.texts):
            choice = {"index": index, **self._form.choice(text), "finish_reason": text.finish_reason}
            if self.figures:
                choice["x_paceline"] = text.figures()
            choices.append(choice)
        return {**self._head(self._form.whole), "choices": choices, "usage": usage(self._job, self.texts)}

    def opening(self, index: int) -> Json:
        choice = self._form.opening()
        if self.texts[index].choice.echo:
            choice["text"] = self.texts[index].choice.echo
        return self._chunk(index, choice)

    def chunk(self, index: int, output: RequestOutput) -> Json:
        """A piece of text `index`, which has already been added to it."""
        choice = self._form.chunk(self.texts[index], output)
        if self.figures:
            about = {"from_draft": output.from_draft, "drafted": output.num_drafted, "tokens": len(output.token_ids)}
            choice["x_paceline"] = about
        return self._chunk(index, choice)

    def closing(self, index: int) -> Json:
        choice, text = self._form.closing(), self.texts[index]
        if self.figures:
            choice["x_paceline"] = text.figures()
        return self._chunk(index, choice, text.finish_reason)

    def last(self) -> Json:
        """The chunk that carries only the usage."""
        return {**self._head(self._form.part), "choices": [], "usage": usage(self._job, self.texts)}

    def _chunk(self, index: int, choice: Json, finish_reason: str | None = None) -> Json:
        document = {
            **self._head(self._form.part),
            "choices": [{"index": index, **choice, "finish_reason": finish_reason}],
        }
        if self._job.include_usage:
            document["usage"] = None
        return document
