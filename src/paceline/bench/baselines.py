"""transformers' own generate, under the same stopwatch and the same counter."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch

from paceline.bench.candidates import Subject
from paceline.bench.measure import Length, Written
from paceline.core.stats import SpecStats
from paceline.errors import OptionError

PEERS = ("hf",)


@dataclass(frozen=True, slots=True)
class Peer:
    """One way of transformers to write: plain, with an assistant model, or by prompt lookup."""

    name: str
    model: Any
    extra: dict[str, Any]

    def write(self, prompts: list[list[int]], length: Length, temperature: float, seed: int = 0) -> Written:
        """Answer the prompts one after another: transformers speculates for one text at a time."""
        torch.manual_seed(seed)
        answers: list[list[int]] = []
        started = time.perf_counter()
        for ids in prompts:
            answers.append(self._answer(ids, length, temperature))
        stats = SpecStats(new_tokens=sum(map(len, answers)), seconds=time.perf_counter() - started)
        return Written(answers, stats, [], [])

    def _answer(self, ids: list[int], length: Length, temperature: float) -> list[int]:
        given = torch.tensor([ids], device=self.model.device)
        chosen: dict[str, Any] = {"do_sample": temperature > 0, "max_new_tokens": length.max_new_tokens}
        if temperature > 0:
            chosen |= {"temperature": temperature, "top_k": 0, "top_p": 1.0}
        if length.ignore_eos:
            chosen["min_new_tokens"] = length.max_new_tokens
        with torch.inference_mode():
            out = self.model.generate(
                given, attention_mask=torch.ones_like(given), pad_token_id=0, **chosen, **self.extra
            )
        return [int(token) for token in out[0, len(ids) :]]


def peers_of(subject: Subject, words: list[str], num_draft_tokens: int = 5) -> list[Peer]:
    """The peers asked for. Raises OptionError where the target is not a transformers model."""
    for word in words:
        if word not in PEERS:
            raise OptionError(f"there is no peer {word!r}; there is {', '.join(PEERS)}")
    if not words:
        return []
    model = subject.peer_model("target")
    if model is None:
        raise OptionError("--peers hf needs a target that transformers can run, in fp32, bf16 or fp16")
    found = [Peer("transformers", model, {})]
    draft = subject.peer_model("draft")
    if draft is not None:
        draft.generation_config.num_assistant_tokens = num_draft_tokens
        found.append(Peer("transformers assistant", model, {"assistant_model": draft}))
    found.append(Peer("transformers prompt lookup", model, {"prompt_lookup_num_tokens": num_draft_tokens}))
    return found
