"""SpeculativeDecoder, the Python face."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, overload

import torch
from torch import Tensor

from paceline.assemble import Assembly, assemble
from paceline.core.acceptance import COUPLED
from paceline.core.distribution import SamplingParams
from paceline.core.protocols import ModelCard, Piece, TokenLogprob
from paceline.core.sequence import Sequence
from paceline.core.stopping import StopRules
from paceline.core.tally import Tally
from paceline.decode.generate import Progress, run
from paceline.decode.rules import stop_rules
from paceline.decode.text import Codec, Message, Prompt, Stream
from paceline.errors import OptionError
from paceline.kv.prefixes import shared_beginning
from paceline.options import DecoderOptions, checked_draft_tokens

DEFAULT_NEW_TOKENS = 256
SAMPLING_NAMES = frozenset(SamplingParams.__dataclass_fields__)


@dataclass(frozen=True, slots=True)
class Result:
    """One finished text. stats holds every rate: acceptance_rate, tokens_per_step, tokens_per_second, …"""

    text: str
    token_ids: list[int]
    finish_reason: str
    stats: Tally
    prompt_tokens: int
    guessed: list[bool]  # of each token: was it a guess that stood?
    logprobs: list[TokenLogprob] | None = None


class SpeculativeDecoder:
    """Writes text with a language model, several tokens a pass, without changing what it would have written.

        decoder = SpeculativeDecoder("default", draft="ngram", draft_tokens=4)
        print(decoder.generate("Explain attention.", max_new_tokens=64).text)

    target        a name (`default`, a Hub id, a directory, a .gguf file) or a loaded AutoModelForCausalLM
    draft         a smaller model, named the same way, or the word of a method that needs none ("ngram", …), or None
    draft_tokens  guesses a round, 0 to 128, or "auto": as many as pay on this machine with this text, none if none do
    Further options are the fields of `paceline.options.DecoderOptions`.
    """

    def __init__(self, target: Any = "default", draft: Any = None, **options: Any) -> None:
        unknown = set(options) - set(DecoderOptions.__dataclass_fields__)
        if unknown:
            raise OptionError(f"unknown option: {', '.join(sorted(unknown))}")
        self._assembly: Assembly = assemble(DecoderOptions(target, draft, **options))
        self._machinery = self._assembly.machinery
        self._resident: Sequence | None = None  # the last turn of a conversation, its cache still warm

    @property
    def card(self) -> ModelCard:
        return self._machinery.target.card

    @property
    def codec(self) -> Codec:
        return self._assembly.codec

    @property
    def options(self) -> DecoderOptions:
        return self._assembly.options

    # --- text in, text out --------------------------------------------------------------------------------------------

    @overload
    def generate(self, prompt: str | list[Message], **settings: Any) -> Result: ...
    @overload
    def generate(self, prompt: list[str] | list[list[Message]], **settings: Any) -> list[Result]: ...
    def generate(self, prompt: Any, **settings: Any) -> Result | list[Result]:
        """Write the continuation of a text, the answer to chat messages, or of a list of either, together.

        settings: max_new_tokens, stop, ignore_end, logprobs, draft_tokens, and the fields of SamplingParams
        (temperature, top_k, top_p, min_p, penalties, logit_bias, seed). In a list, text i has seed + i.
        """
        many = _is_many(prompt)
        texts = [self._text(one, number, settings) for number, one in enumerate(prompt if many else [prompt])]
        for _ in run(texts, self._machinery, largest_batch=self.options.largest_batch):
            pass
        results = [self._result(text) for text in texts]
        return results if many else results[0]

    def stream(self, prompt: str | list[Message], *, keep_cache: bool = False, **settings: Any) -> Iterator[Piece]:
        """Yield pieces as they are written, one a token; `piece.guessed` says whether it was a guess that stood.

        keep_cache: the text stays in memory afterwards, and the next call that begins with it reads only what is new.
        """
        text = self._text(prompt, 0, settings)
        if keep_cache:
            self._take_over(text)
        characters = self.codec.stream(text.stopping.stop_strings)
        try:
            for progress in run([text], self._machinery, keep_slots=keep_cache):
                yield from _pieces(progress, characters)
        finally:
            if keep_cache:
                self._resident = text

    # --- ids in, ids out ----------------------------------------------------------------------------------------------

    def decode(self, input_ids: Tensor, attention_mask: Tensor | None = None, **settings: Any) -> Tensor:
        """Token ids [batch, length] or [length] in; prompt and continuation out, padded on the right, as
        transformers' generate returns them. Padding in front is marked by attention_mask."""
        ids = input_ids if input_ids.dim() == 2 else input_ids[None]
        prompts = prompts_in(ids, attention_mask)
        texts = [self._text(prompt, number, settings) for number, prompt in enumerate(prompts)]
        for _ in run(texts, self._machinery, largest_batch=self.options.largest_batch):
            pass
        out = continued(ids, texts, self._pad_token())
        return out if input_ids.dim() == 2 else out[0]

    # --- inside -------------------------------------------------------------------------------------------------------

    def _text(self, prompt: Prompt, number: int, settings: dict[str, Any]) -> Sequence:
        """A text ready to be written, or an OptionError or PromptError."""
        chosen = dict(settings)
        stop = chosen.pop("stop", ())
        wanted = chosen.pop("max_new_tokens", DEFAULT_NEW_TOKENS)
        ignore_end, logprobs = chosen.pop("ignore_end", False), chosen.pop("logprobs", None)
        draft_tokens = chosen.pop("draft_tokens", None)
        unknown = set(chosen) - SAMPLING_NAMES
        if unknown:
            raise OptionError(f"unknown setting: {', '.join(sorted(unknown))}")
        if chosen.get("seed") is not None:
            chosen["seed"] = int(chosen["seed"]) + number
        ids = self.codec.encode(prompt)
        text = Sequence(ids, SamplingParams(**chosen), self._rules(ids, wanted, stop, ignore_end), logprobs=logprobs)
        if draft_tokens is not None and checked_draft_tokens(draft_tokens) != "auto":
            text.draft_tokens = int(draft_tokens)
        if text.sampling.seed is not None and self.options.acceptance is None and self.options.by_the_clock:
            text.acceptance = COUPLED
        return text

    def _rules(self, ids: list[int], wanted: int, stop: Any, ignore_end: bool) -> StopRules:
        return stop_rules(self.card, self.codec, ids, wanted, stop, ignore_end)

    def _result(self, text: Sequence) -> Result:
        characters = self.codec.stream(text.stopping.stop_strings)
        shown = characters.feed(text.written) + characters.flush()
        logprobs = text.token_logprobs if text.logprobs is not None else None
        reason = text.finish_reason or "abort"
        return Result(shown, text.written, reason, text.tally, text.prompt_length, text.guessed, logprobs)

    def _take_over(self, text: Sequence) -> None:
        """Go on in the last turn's cache, as far as the new text begins as that one did."""
        last, self._resident = self._resident, None
        if last is None or last.slot is None:
            return
        common = shared_beginning(last.ids, text.ids)
        self._machinery.target.trim(last.slot, min(common, len(text.ids) - 1))
        text.slot, last.slot = last.slot, None
        text.reused = text.slot.length

    def _pad_token(self) -> int:
        tokenizer = self.codec.tokenizer
        for name in ("pad_token_id", "eos_token_id"):
            if getattr(tokenizer, name, None) is not None:
                return int(getattr(tokenizer, name))
        return min(self.card.end_tokens, default=0)


def continued(ids: Tensor, texts: list[Sequence], pad: int) -> Tensor:
    """Prompts [batch, length] with what was written behind them, shorter ones padded on the right."""
    longest = max(text.new_tokens for text in texts)
    fresh = [text.written + [pad] * (longest - text.new_tokens) for text in texts]
    return torch.cat([ids, torch.tensor(fresh, dtype=ids.dtype).reshape(len(texts), longest).to(ids.device)], dim=-1)


def prompts_in(ids: Tensor, attention_mask: Tensor | None) -> list[list[int]]:
    """The token ids of each row [batch, length] without its padding."""
    mask = torch.ones_like(ids) if attention_mask is None else attention_mask.reshape(ids.shape)
    return [row[seen.bool()].tolist() for row, seen in zip(ids.cpu(), mask.cpu())]


def _is_many(prompt: Any) -> bool:
    """A list of prompts, as against one prompt that is a list of messages."""
    return isinstance(prompt, list | tuple) and bool(prompt) and not isinstance(prompt[0], dict | int)


def _pieces(progress: Progress, characters: Stream) -> Iterator[Piece]:
    """One piece a token; the last one tells why the text ended."""
    text, emitted = progress.text, progress.round.emitted
    for index, token in enumerate(emitted):
        shown = characters.feed([token])
        last = text.finished and index == len(emitted) - 1
        if last:
            shown += characters.flush()
        logprobs = None
        if text.logprobs is not None:
            logprobs = (text.token_logprobs[text.new_tokens - len(emitted) + index],)
        yield Piece(
            shown,
            (token,),
            index < progress.round.accepted,
            logprobs,
            text.finish_reason if last else None,
            text.tally if last else None,
        )
