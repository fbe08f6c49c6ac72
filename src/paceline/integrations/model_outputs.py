"""Hidden states, attentions and the cache of generated sequences, for calls of `generate` that ask for them.

Decoding keeps none of them. They are computed afterwards, by one pass of the model over the tokens that were accepted,
and divided into one part for each generated token, as transformers does.
"""

from __future__ import annotations

import copy
import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.errors import OptionError

OUTPUTS = ("output_attentions", "output_hidden_states")
SAME_LOGPROB = {torch.float64: 1e-3, torch.float32: 0.02}  # what rounding explains; 0.25 in 16 bits
NUM_COMPARED = 8  # the likeliest tokens: those of rare ones round further apart
STATES = "cache_params"  # the name of a cache of states alone; it knows no number of tokens

Steps = tuple[Any, ...]  # one entry a generated token, each a tuple of layers


@dataclass(frozen=True, slots=True)
class ModelOutputs:
    """Fields of transformers' output, in its form. past_key_values holds every token but the last."""

    attentions: Steps | None = None
    hidden_states: Steps | None = None
    past_key_values: Any = None


@dataclass(frozen=True, slots=True)
class _Parts:
    """How one pass divides into generated tokens.

    first       the first token that the pass computes
    cached      tokens of the prompt that transformers would not compute: they were in the cache of the call
    prompt      tokens of the prompt, those in the cache among them
    num_tokens  generated tokens
    use_cache   without a cache transformers computes every token again at each step
    """

    first: int
    cached: int
    prompt: int
    num_tokens: int
    use_cache: bool

    def queries(self, step: int) -> slice:
        """Of the tokens of the pass, those that are computed in this step."""
        end = self.prompt - self.first + step
        return slice(end - 1 if step and self.use_cache else self.cached - self.first, end)

    def of_hidden_states(self, layers: Any) -> Steps:
        """layers [batch, tokens, hidden] each"""
        return tuple(tuple(layer[:, self.queries(step)] for layer in layers) for step in range(self.num_tokens))

    def of_attentions(self, layers: Any) -> Steps:
        """layers [batch, heads, tokens, keys] each; None where the attention in use computes none."""
        if layers is None:
            return (None,) * self.num_tokens
        return tuple(
            tuple(_before(layer, self.queries(step), self.prompt + step) for layer in layers)
            for step in range(self.num_tokens)
        )


def _before(layer: Tensor | None, queries: slice, num_keys: int) -> Tensor | None:
    """Attentions of some tokens, without the keys of later ones. Layers without attention have None."""
    return None if layer is None else layer[:, :, queries, :num_keys]


@dataclass(frozen=True, slots=True)
class _CallCache:
    """The cache that `generate` hands on, under the name that the model takes it by. value: None without a cache."""

    name: str
    value: Any
    num_tokens: int = 0

    @classmethod
    def of(cls, inputs: dict[str, Any]) -> _CallCache:
        if inputs.get(STATES) is not None:
            return cls(STATES, inputs[STATES])
        cache = inputs.get("past_key_values")
        return cls("past_key_values", cache, 0 if cache is None else int(cache.get_seq_length()))

    def emptied(self, model: Any) -> _CallCache:
        """A new cache of this kind."""
        return _CallCache(self.name, type(self.value)(config=model.config.get_text_config(decoder=True)))


def model_outputs(
    model: Any, sequences: Tensor, prompt_length: int, config: Any, inputs: dict[str, Any]
) -> ModelOutputs:
    """One pass over all tokens but the last. Fills the cache of the call. inputs: what `generate` hands on.

    A recurrent state is computed from the first token on: some models read several tokens after a state wrongly.
    """
    given = cache = _CallCache.of(inputs)
    if given.num_tokens and model._is_stateful:
        cache = given.emptied(model)
    num_tokens = sequences.shape[1] - prompt_length
    parts = _Parts(cache.num_tokens, given.num_tokens, prompt_length, num_tokens, cache.value is not None)
    asked = {name: True for name in OUTPUTS if getattr(config, name)}
    outputs = _forward(model, sequences[:, :-1], inputs.get("attention_mask"), cache, **asked)
    return ModelOutputs(
        parts.of_attentions(outputs.get("attentions")) if "output_attentions" in asked else None,
        parts.of_hidden_states(outputs.hidden_states) if "output_hidden_states" in asked else None,
        cache.value,
    )


def check_cache(model: Any, input_ids: Tensor, inputs: dict[str, Any]) -> None:
    """Raise OptionError unless a cache with tokens in it was made from the first tokens of input_ids.

    Decoding computes these again, so another content would change the output without a word.
    """
    cache, mask = _CallCache.of(inputs), inputs.get("attention_mask")
    if cache.name == STATES and cache.value.has_previous_state():
        raise OptionError(f"hf_generate computes the state from the tokens: call generate without {STATES}")
    if not cache.num_tokens:
        return
    if cache.num_tokens >= input_ids.shape[1] or (mask is not None and mask.shape[1] != input_ids.shape[1]):
        raise OptionError("hf_generate needs all tokens: pass those that past_key_values holds in input_ids as well")
    copied = _CallCache(cache.name, copy.deepcopy(cache.value), cache.num_tokens)
    with_cache, without = (
        _next_logprobs(model, input_ids, mask, own) for own in (copied, _CallCache("past_key_values", None))
    )
    likely = without.topk(min(NUM_COMPARED, without.shape[-1])).indices
    change = (with_cache - without).gather(-1, likely).abs().max()
    if float(change) > SAME_LOGPROB.get(model.dtype, 0.25):
        raise OptionError("past_key_values was not made from the first tokens of input_ids: call generate without it")


def _next_logprobs(model: Any, tokens: Tensor, mask: Tensor | None, cache: _CallCache) -> Tensor:
    logits: Tensor = _forward(model, tokens, mask, cache).logits[:, -1]
    return torch.log_softmax(logits.double(), dim=-1)  # [batch, vocab]


def _forward(model: Any, tokens: Tensor, mask: Tensor | None, cache: _CallCache, **outputs: bool) -> Any:
    """The tokens that the cache does not hold, with the mask and the positions that `generate` would give them."""
    mask = torch.ones_like(tokens) if mask is None else mask
    mask = torch.cat([mask, mask.new_ones(len(mask), max(0, tokens.shape[1] - mask.shape[1]))], dim=1)
    arguments = {
        "attention_mask": mask,
        "position_ids": (mask.long().cumsum(dim=-1) - 1).clamp(min=0)[:, cache.num_tokens :],
        cache.name: cache.value,
        "use_cache": cache.value is not None,
    }
    known = inspect.signature(model.forward).parameters
    taken = {name: value for name, value in arguments.items() if name in known}
    return model(input_ids=tokens[:, cache.num_tokens :], **taken, **outputs, return_dict=True)
