"""`model.generate(..., custom_generate=paceline.hf_generate)`: a transformers user changes one line.

transformers passes the prompt's ids and lists of logits processors and stopping criteria, made from the generation
config. Those that paceline has a setting for are read back from these lists; any other one is refused, because leaving
it out would change the output.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from paceline.build import build_engine
from paceline.config import EngineConfig
from paceline.core.sampling import SamplingParams
from paceline.core.sequence import Sequence, SequenceParams
from paceline.core.stopping import StopRules
from paceline.core.token_arrays import append_generated, prompts_of
from paceline.errors import OptionError

# transformers' class -> (where it keeps its value, our setting)
PROCESSORS = {
    "TemperatureLogitsWarper": ("temperature", "temperature"),
    "TopKLogitsWarper": ("top_k", "top_k"),
    "TopPLogitsWarper": ("top_p", "top_p"),
    "MinPLogitsWarper": ("min_p", "min_p"),
    "RepetitionPenaltyLogitsProcessor": ("penalty", "repetition_penalty"),
}
# Inputs that hf_generate reads, or that change nothing: transformers itself adds some of them.
KNOWN_INPUTS = frozenset(
    ("attention_mask", "position_ids", "past_key_values", "inputs_embeds", "use_cache", "cache_position")
    + ("logits_to_keep", "return_dict", "output_attentions", "output_hidden_states")
)
USER_NAMES = {"mm_encoder_outputs": "pixel_values or other inputs that are not text"}  # encoded before we are called
UNSUPPORTED_OUTPUTS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")


def hf_generate(
    model: Any,
    input_ids: Tensor,
    logits_processor: Any = (),
    stopping_criteria: Any = (),
    generation_config: Any = None,
    method: str | None = None,
    draft_model: Any = None,
    num_draft_tokens: int | str = 4,
    **model_kwargs: Any,
) -> Any:
    """The callable for `custom_generate=`: the same call, the same result, decoded speculatively.

    method            how to draft; give it to generate(...). Default: `draft_model` if there is one, else `ngram`
    draft_model       a loaded draft model, or a model's name; one that is named is loaded at every call
    num_draft_tokens  draft tokens a step, 0 to 128, or "auto"
    Sampling settings, lengths and end tokens are those of the call. What cannot be honoured (beams, processors and
    criteria of your own, scores, images and other inputs beside the tokens) raises OptionError.
    """
    _refuse_unsupported(generation_config, model_kwargs)
    _check_inputs(input_ids, model_kwargs)
    sampling = sampling_from(logits_processor, bool(generation_config.do_sample))
    pad = _pad_token(generation_config)
    prompts = prompts_of(input_ids, model_kwargs.get("attention_mask"))
    rules = stop_rules_from(stopping_criteria, input_ids.shape[-1])
    config = EngineConfig.create(
        model,
        method=method or ("ngram" if draft_model is None else None),
        draft_model=draft_model,
        num_draft_tokens=num_draft_tokens,
        tokenizer=None if isinstance(draft_model, str) else _IdsOnly(),  # two vocabularies have to be compared
        max_num_seqs=len(prompts),
        prefix_cache_tokens=0,
    )
    params = SequenceParams(sampling, rules)
    seqs = build_engine(config).run([Sequence(prompt, params) for prompt in prompts])
    return _in_requested_form(append_generated(input_ids, [seq.generated for seq in seqs], pad), generation_config)


def sampling_from(processors: Any, do_sample: bool) -> SamplingParams:
    """Our settings for a list of transformers' processors. Raises OptionError for one we do not have."""
    settings: dict[str, Any] = {"temperature": 1.0}
    for processor in processors or ():
        kind = type(processor).__name__
        if kind not in PROCESSORS or getattr(processor, "prompt_ignore_length", None):
            raise OptionError(f"hf_generate cannot honour {kind}; known are {', '.join(PROCESSORS)}")
        attribute, setting = PROCESSORS[kind]
        settings[setting] = getattr(processor, attribute)
    return SamplingParams(**settings) if do_sample else SamplingParams(**{**settings, "temperature": 0.0})


def stop_rules_from(criteria: Any, prompt_length: int) -> StopRules:
    """What ends a sequence, from a list of transformers' criteria."""
    max_new_tokens, eos = 1 << 20, frozenset[int]()
    for criterion in criteria or ():
        kind = type(criterion).__name__
        if kind == "MaxLengthCriteria":
            max_new_tokens = criterion.max_length - prompt_length
        elif kind == "EosTokenCriteria":
            eos = frozenset(criterion.eos_token_id.tolist())
        else:
            raise OptionError(f"hf_generate cannot honour {kind}; sequences end by length and end tokens")
    return StopRules(max_new_tokens, eos)


def _refuse_unsupported(config: Any, model_kwargs: dict[str, Any]) -> None:
    if config is None:
        raise OptionError("hf_generate is called by transformers: model.generate(..., custom_generate=hf_generate)")
    if (config.num_beams or 1) > 1:
        raise OptionError("hf_generate generates each sequence once: num_beams must be 1")
    outputs = [name for name in UNSUPPORTED_OUTPUTS if getattr(config, name, None)]
    if outputs:
        raise OptionError(f"hf_generate does not return {', '.join(outputs)}")
    if model_kwargs.get("inputs_embeds") is not None:
        raise OptionError("hf_generate reads token ids, not inputs_embeds")
    cache = model_kwargs.get("past_key_values")
    if cache is not None and cache.get_seq_length() > 0:
        raise OptionError("hf_generate keeps a cache of its own: call it without past_key_values")


def _check_inputs(input_ids: Tensor, inputs: dict[str, Any]) -> None:
    """Raise OptionError for an input that would be left out, and so change the output."""
    unknown = sorted(USER_NAMES.get(name, name) for name in inputs.keys() - KNOWN_INPUTS if not _is_empty(inputs[name]))
    if unknown:
        raise OptionError(f"hf_generate reads token ids alone: call generate without {', '.join(unknown)}")
    positions, mask = inputs.get("position_ids"), inputs.get("attention_mask")
    if positions is None:
        return
    mask = torch.ones_like(input_ids) if mask is None else mask
    usual = mask.long().cumsum(dim=-1) - 1
    same_shape = positions.dim() == 2 and positions.shape[-1] == usual.shape[-1]
    if not same_shape or bool(((positions != usual) & mask.bool()).any()):
        raise OptionError("hf_generate counts positions from the attention mask: call generate without position_ids")


def _is_empty(value: Any) -> bool:
    return value is None or (isinstance(value, dict | list | tuple) and not value)


def _pad_token(config: Any) -> int:
    prepared = getattr(config, "_pad_token_tensor", None)
    if prepared is not None:
        return int(prepared)
    return int(config.pad_token_id or 0)


def _in_requested_form(sequences: Tensor, config: Any) -> Any:
    if not config.return_dict_in_generate:
        return sequences
    from transformers.generation.utils import GenerateDecoderOnlyOutput

    return GenerateDecoderOnlyOutput(sequences=sequences)


class _IdsOnly:
    """Stands in for a tokenizer where ids go in and ids come out."""

    def get_vocab(self) -> dict[str, int]:
        return {}
