"""SpeculativeDecoder, the Python face."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, overload

import torch
from torch import Tensor

from paceline.build import Assembly, assemble
from paceline.config import DecoderOptions, checked_num_draft_tokens
from paceline.core.sampling import SamplingParams
from paceline.core.sequence import Sequence
from paceline.core.stats import SpecStats
from paceline.core.stopping import StopRules
from paceline.core.types import ModelInfo, RequestOutput, TokenLogprob
from paceline.core.verify import COUPLED
from paceline.engines.local.generate import Progress, run
from paceline.engines.local.stop_conditions import stop_rules
from paceline.errors import OptionError
from paceline.hub.tokenizer import Message, Prompt, StreamDetokenizer, Tokenizer
from paceline.kv.prefix_cache import common_prefix_length

DEFAULT_NEW_TOKENS = 256
SAMPLING_NAMES = frozenset(SamplingParams.__dataclass_fields__)


@dataclass(frozen=True, slots=True)
class Result:
    """One finished sequence. stats holds every rate: acceptance_rate, tokens_per_step, tokens_per_second, …"""

    text: str
    token_ids: list[int]
    finish_reason: str
    stats: SpecStats
    prompt_tokens: int
    from_draft: list[bool]  # of each token: was it a draft token that stood?
    logprobs: list[TokenLogprob] | None = None


class SpeculativeDecoder:
    """Writes sequence with a language model, several tokens a pass, without changing what it would have written.

        decoder = SpeculativeDecoder("default", draft="ngram", num_draft_tokens=4)
        print(decoder.generate("Explain attention.", max_new_tokens=64).sequence)

    target        a name (`default`, a Hub id, a directory, a .gguf file) or a loaded AutoModelForCausalLM
    draft         a smaller model, named the same way, or the word of a method that needs none ("ngram", …), or None
    num_draft_tokens  draft tokens a step, 0 to 128, or "auto": as many as pay on this machine with this sequence, none if none do
    Further options are the fields of `paceline.config.DecoderOptions`.
    """

    def __init__(self, target: Any = "default", draft: Any = None, **options: Any) -> None:
        unknown = set(options) - set(DecoderOptions.__dataclass_fields__)
        if unknown:
            raise OptionError(f"unknown option: {', '.join(sorted(unknown))}")
        self._assembly: Assembly = assemble(DecoderOptions(target, draft, **options))
        self._parts = self._assembly.parts
        self._resident: Sequence | None = None  # the last turn of a conversation, its cache still warm

    @property
    def info(self) -> ModelInfo:
        return self._parts.target.info

    @property
    def tokenizer(self) -> Tokenizer:
        return self._assembly.tokenizer

    @property
    def options(self) -> DecoderOptions:
        return self._assembly.options

    # --- sequence in, sequence out --------------------------------------------------------------------------------------------

    @overload
    def generate(self, prompt: str | list[Message], **settings: Any) -> Result: ...
    @overload
    def generate(self, prompt: list[str] | list[list[Message]], **settings: Any) -> list[Result]: ...
    def generate(self, prompt: Any, **settings: Any) -> Result | list[Result]:
        """Write the continuation of a sequence, the answer to chat messages, or of a list of either, together.

        settings: max_new_tokens, stop, ignore_eos, logprobs, num_draft_tokens, and the fields of SamplingParams
        (temperature, top_k, top_p, min_p, penalties, logit_bias, seed). In a list, sequence i has seed + i.
        """
        many = _is_many(prompt)
        seqs = [self._text(one, seq_id, settings) for seq_id, one in enumerate(prompt if many else [prompt])]
        for _ in run(seqs, self._parts, max_num_seqs=self.options.max_num_seqs):
            pass
        results = [self._result(seq) for seq in seqs]
        return results if many else results[0]

    def stream(self, prompt: str | list[Message], *, keep_cache: bool = False, **settings: Any) -> Iterator[RequestOutput]:
        """Yield pieces as they are written, one a token; `piece.from_draft` says whether it was a draft token that stood.

        keep_cache: the sequence stays in memory afterwards, and the next call that begins with it reads only what is new.
        """
        seq = self._text(prompt, 0, settings)
        if keep_cache:
            self._take_over(seq)
        characters = self.tokenizer.stream(seq.stopping.stop_strings)
        try:
            for progress in run([seq], self._parts, keep_caches=keep_cache):
                yield from _pieces(progress, characters)
        finally:
            if keep_cache:
                self._resident = seq

    # --- ids in, ids out ----------------------------------------------------------------------------------------------

    def decode(self, input_ids: Tensor, attention_mask: Tensor | None = None, **settings: Any) -> Tensor:
        """Token ids [batch, length] or [length] in; prompt and continuation out, padded on the right, as
        transformers' generate returns them. Padding in front is marked by attention_mask."""
        ids = input_ids if input_ids.dim() == 2 else input_ids[None]
        prompts = prompts_in(ids, attention_mask)
        seqs = [self._text(prompt, seq_id, settings) for seq_id, prompt in enumerate(prompts)]
        for _ in run(seqs, self._parts, max_num_seqs=self.options.max_num_seqs):
            pass
        out = continued(ids, seqs, self._pad_token())
        return out if input_ids.dim() == 2 else out[0]

    # --- inside -------------------------------------------------------------------------------------------------------

    def _text(self, prompt: Prompt, seq_id: int, settings: dict[str, Any]) -> Sequence:
        """A sequence ready to be written, or an OptionError or PromptError."""
        chosen = dict(settings)
        stop = chosen.pop("stop", ())
        wanted = chosen.pop("max_new_tokens", DEFAULT_NEW_TOKENS)
        ignore_eos, logprobs = chosen.pop("ignore_eos", False), chosen.pop("logprobs", None)
        num_draft_tokens = chosen.pop("num_draft_tokens", None)
        unknown = set(chosen) - SAMPLING_NAMES
        if unknown:
            raise OptionError(f"unknown setting: {', '.join(sorted(unknown))}")
        if chosen.get("seed") is not None:
            chosen["seed"] = int(chosen["seed"]) + seq_id
        ids = self.tokenizer.encode(prompt)
        seq = Sequence(ids, SamplingParams(**chosen), self._rules(ids, wanted, stop, ignore_eos), logprobs=logprobs)
        if num_draft_tokens is not None and checked_num_draft_tokens(num_draft_tokens) != "auto":
            seq.num_draft_tokens = int(num_draft_tokens)
        if seq.sampling.seed is not None and self.options.acceptance is None and self.options.by_the_clock:
            seq.acceptance = COUPLED
        return seq

    def _rules(self, ids: list[int], wanted: int, stop: Any, ignore_eos: bool) -> StopRules:
        return stop_rules(self.info, self.tokenizer, ids, wanted, stop, ignore_eos)

    def _result(self, seq: Sequence) -> Result:
        characters = self.tokenizer.stream(seq.stopping.stop_strings)
        shown = characters.feed(seq.written) + characters.flush()
        logprobs = seq.token_logprobs if seq.logprobs is not None else None
        reason = seq.finish_reason or "abort"
        return Result(shown, seq.written, reason, seq.stats, seq.prompt_length, seq.from_draft, logprobs)

    def _take_over(self, seq: Sequence) -> None:
        """Go on in the last turn's cache, as far as the new sequence begins as that one did."""
        last, self._resident = self._resident, None
        if last is None or last.seq_cache is None:
            return
        common = common_prefix_length(last.ids, seq.ids)
        self._parts.target.truncate(last.seq_cache, min(common, len(seq.ids) - 1))
        seq.seq_cache, last.seq_cache = last.seq_cache, None
        seq.num_cached_tokens = seq.seq_cache.length

    def _pad_token(self) -> int:
        tokenizer = self.tokenizer.hf_tokenizer
        for name in ("pad_token_id", "eos_token_id"):
            if getattr(tokenizer, name, None) is not None:
                return int(getattr(tokenizer, name))
        return min(self.info.eos_token_ids, default=0)


def continued(ids: Tensor, seqs: list[Sequence], pad: int) -> Tensor:
    """Prompts [batch, length] with what was written behind them, shorter ones padded on the right."""
    longest = max(seq.new_tokens for seq in seqs)
    fresh = [seq.written + [pad] * (longest - seq.new_tokens) for seq in seqs]
    return torch.cat([ids, torch.tensor(fresh, dtype=ids.dtype).reshape(len(seqs), longest).to(ids.device)], dim=-1)


def prompts_in(ids: Tensor, attention_mask: Tensor | None) -> list[list[int]]:
    """The token ids of each row [batch, length] without its padding."""
    mask = torch.ones_like(ids) if attention_mask is None else attention_mask.reshape(ids.shape)
    return [row[seen.bool()].tolist() for row, seen in zip(ids.cpu(), mask.cpu())]


def _is_many(prompt: Any) -> bool:
    """A list of prompts, as against one prompt that is a list of messages."""
    return isinstance(prompt, list | tuple) and bool(prompt) and not isinstance(prompt[0], dict | int)


def _pieces(progress: Progress, characters: StreamDetokenizer) -> Iterator[RequestOutput]:
    """One piece a token; the last one tells why the sequence ended."""
    seq, emitted = progress.seq, progress.round.emitted
    for index, token in enumerate(emitted):
        shown = characters.feed([token])
        last = seq.finished and index == len(emitted) - 1
        if last:
            shown += characters.flush()
        logprobs = None
        if seq.logprobs is not None:
            logprobs = (seq.token_logprobs[seq.new_tokens - len(emitted) + index],)
        yield RequestOutput(
            shown,
            (token,),
            index < progress.round.accepted,
            logprobs,
            seq.finish_reason if last else None,
            seq.stats if last else None,
        )
