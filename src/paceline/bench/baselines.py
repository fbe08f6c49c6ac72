"""transformers' own generate, under the same stopwatch and the same counter."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch

from paceline.bench.candidates import Candidates
from paceline.bench.measure import BatchRun, OutputLength
from paceline.core.stats import SpecStats
from paceline.errors import OptionError

BASELINES = ("hf",)


@dataclass(frozen=True, slots=True)
class Baseline:
    """One way of transformers to generate: plain, with an assistant model, or by prompt lookup."""

    name: str
    model: Any
    options: dict[str, Any]

    def run(self, prompts: list[list[int]], length: OutputLength, temperature: float, seed: int = 0) -> BatchRun:
        """Generate one output after another: transformers speculates for one sequence at a time."""
        torch.manual_seed(seed)
        started = time.perf_counter()
        outputs = [self._generate(prompt, length, temperature) for prompt in prompts]
        stats = SpecStats(new_tokens=sum(map(len, outputs)), seconds=time.perf_counter() - started)
        return BatchRun(outputs, stats, [], [])

    def _generate(self, prompt: list[int], length: OutputLength, temperature: float) -> list[int]:
        input_ids = torch.tensor([prompt], device=self.model.device)
        options: dict[str, Any] = {"do_sample": temperature > 0, "max_new_tokens": length.max_new_tokens}
        if temperature > 0:
            options |= {"temperature": temperature, "top_k": 0, "top_p": 1.0}
        if length.ignore_eos:
            options["min_new_tokens"] = length.max_new_tokens
        mask = torch.ones_like(input_ids)
        with torch.inference_mode():
            ids = self.model.generate(input_ids, attention_mask=mask, pad_token_id=0, **options, **self.options)
        return [int(token) for token in ids[0, len(prompt) :]]


def open_baselines(candidates: Candidates, names: list[str], num_draft_tokens: int = 5) -> list[Baseline]:
    """The baselines of these names. Raises OptionError where the target is not a model of transformers."""
    for name in names:
        if name not in BASELINES:
            raise OptionError(f"there is no baseline {name!r}; there is {', '.join(BASELINES)}")
    if not names:
        return []
    model = candidates.hf_model("target")
    if model is None:
        raise OptionError("--baselines hf needs a model that transformers can run, in fp32, bf16 or fp16")
    baselines = [Baseline("transformers", model, {})]
    draft = candidates.hf_model("draft")
    if draft is not None:
        draft.generation_config.num_assistant_tokens = num_draft_tokens
        baselines.append(Baseline("transformers assistant", model, {"assistant_model": draft}))
    baselines.append(Baseline("transformers prompt lookup", model, {"prompt_lookup_num_tokens": num_draft_tokens}))
    return baselines
