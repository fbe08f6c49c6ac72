"""`model.generate(..., custom_generate=paceline.hf_generate)`: a transformers user changes one line.

transformers passes the prompt's ids and lists of logits processors and stopping criteria, made from the generation
config and from those of the call. All of them are honoured, node by node (integrations/processors.py); those that
paceline has a setting for are computed for many nodes at once. What speculation cannot do is refused by name.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from paceline.build import build_engine
from paceline.config import EngineConfig
from paceline.core.sequence import Sequence, SequenceParams
from paceline.core.token_arrays import append_generated, prompts_of
from paceline.core.types import RequestOutput
from paceline.engines.local.engine import LocalEngine
from paceline.errors import OptionError, PacelineError
from paceline.integrations.model_outputs import STATES, ModelOutputs, check_cache, model_outputs
from paceline.integrations.processors import BatchRow, NodeProcessor, ScoreRecord, processing_of, stop_rules_of

DEFAULT_DRAFT_TOKENS = 4
CACHES = ("past_key_values", STATES)  # names that models take a cache by
# Inputs that hf_generate reads, or that change nothing: transformers itself adds some of them.
KNOWN_INPUTS = frozenset(
    ("attention_mask", "position_ids", "inputs_embeds", "use_cache", "cache_position", *CACHES)
    + ("logits_to_keep", "return_dict", "output_attentions", "output_hidden_states")
)
USER_NAMES = {"mm_encoder_outputs": "pixel_values or other inputs that are not text"}  # encoded before we are called
UNSUPPORTED_SEARCHES = {
    "penalty_alpha": "contrastive search",
    "dola_layers": "DoLa decoding",
    "constraints": "constrained beam search",
    "force_words_ids": "constrained beam search",
    "use_mtp": "MTP heads",
}


@dataclass(frozen=True, slots=True)
class CallArguments:
    """Arguments of `generate` that transformers does not pass on to a callable."""

    streamer: Any = None
    assistant_model: Any = None
    has_cache: bool = False  # the caller's own past_key_values, which is filled


@dataclass(frozen=True, slots=True)
class _Draft:
    """How the call asks for draft tokens."""

    method: str | None
    draft_model: Any
    num_draft_tokens: int | str
    options: dict[str, Any]


def hf_generate(
    model: Any,
    input_ids: Tensor,
    logits_processor: Any = (),
    stopping_criteria: Any = (),
    generation_config: Any = None,
    method: str | None = None,
    draft_model: Any = None,
    num_draft_tokens: int | str | None = None,
    **model_kwargs: Any,
) -> Any:
    """The callable for `custom_generate=`: the same call, the same result, decoded speculatively.

    method            how to draft; give it to generate(...). Default: `draft_model` if there is one, else `ngram`
    draft_model       a loaded draft model, or a model's name; one that is named is loaded at every call
    num_draft_tokens  draft tokens a step, 0 to 128, or "auto"; default: 4
    `assistant_model`, `assistant_early_exit` and `prompt_lookup_num_tokens` of the call choose how to draft too.
    Sampling settings, processors, criteria, lengths, end tokens and the streamer are those of the call. What
    speculation cannot do (beams, images and other inputs beside the tokens) raises OptionError. Hidden states,
    attentions and past_key_values of the result come from one more pass, over the accepted tokens. transformers loses
    the tokenizer that `stop_strings` needs before it calls any callable: give the call
    `stopping_criteria=[StopStringCriteria(tokenizer, strings)]` in their place.
    """
    _refuse_unsupported(model, generation_config, model_kwargs)
    _check_inputs(model_kwargs)
    check_cache(model, input_ids, model_kwargs)
    _check_positions(input_ids, model_kwargs)
    arguments = call_arguments()
    draft = _draft(generation_config, arguments, method, draft_model, num_draft_tokens)
    _check_draft(model, draft.draft_model)
    prompts = prompts_of(input_ids, model_kwargs.get("attention_mask"))
    config = EngineConfig.create(
        model,
        method=draft.method,
        draft_model=draft.draft_model,
        num_draft_tokens=draft.num_draft_tokens,
        draft_options=draft.options,
        tokenizer=None if isinstance(draft.draft_model, str) else _IdsOnly(),  # two vocabularies have to be compared
        max_num_seqs=len(prompts),
        prefix_cache_tokens=0,
    )
    records = [ScoreRecord() for _ in prompts] if _records_scores(generation_config) else None
    params = _sequence_params(input_ids, logits_processor, stopping_criteria, generation_config, records)
    seqs = [Sequence(prompt, own) for prompt, own in zip(prompts, params)]
    _run(build_engine(config), seqs, arguments.streamer)
    sequences = append_generated(input_ids, [seq.generated for seq in seqs], _pad_token(generation_config))
    outputs = ModelOutputs()
    if generation_config.return_dict_in_generate or arguments.has_cache:
        outputs = model_outputs(model, sequences, input_ids.shape[1], generation_config, model_kwargs)
    return _in_requested_form(sequences, generation_config, records, outputs)


# --- what the call asks for -------------------------------------------------------------------------------------------


def call_arguments() -> CallArguments:
    """The streamer, the assistant and the cache of the `generate` that calls hf_generate.

    transformers hands a callable neither of the first two, and puts the prompt into the streamer all the same: its
    reader would never see the end. A cache it makes itself where the caller gives none. All are read from the frame of
    `generate`.
    """
    for frame in _callers(sys._getframe(1)):
        values = frame.f_locals
        if frame.f_code.co_name == "generate" and values.get("custom_generate") is hf_generate:
            has_cache = any(values.get("kwargs", {}).get(name) is not None for name in CACHES)
            return CallArguments(values.get("streamer"), values.get("assistant_model"), has_cache)
    return CallArguments()


def _callers(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _draft(
    config: Any, arguments: CallArguments, method: str | None, draft_model: Any, num_draft_tokens: int | str | None
) -> _Draft:
    """Our own arguments first, then those of transformers' assisted generation."""
    options: dict[str, Any] = {}
    draft_model = arguments.assistant_model if draft_model is None else draft_model
    if method is None and draft_model is None:
        early_exit, lookup = config.assistant_early_exit, config.prompt_lookup_num_tokens
        method = "ngram"
        if early_exit is not None:
            method, options = "layerskip", {"layer": int(early_exit)}
        elif lookup is not None and num_draft_tokens is None:
            num_draft_tokens = int(lookup)
    elif num_draft_tokens is None and draft_model is arguments.assistant_model is not None:
        num_draft_tokens = draft_model.generation_config.num_assistant_tokens  # None unless the user has set it
    return _Draft(method, draft_model, DEFAULT_DRAFT_TOKENS if num_draft_tokens is None else num_draft_tokens, options)


def _check_draft(model: Any, draft_model: Any) -> None:
    """Raise OptionError for a loaded draft model whose tokens are certainly others."""
    if draft_model is None or isinstance(draft_model, str):
        return
    sizes = [int(part.config.get_text_config().vocab_size) for part in (model, draft_model)]
    if sizes[0] != sizes[1]:
        raise OptionError(
            f"the draft model has {sizes[1]} tokens and the target {sizes[0]}: pass it by name as draft_model, so that "
            "their vocabularies can be compared, or use method cross_vocab"
        )


def _sequence_params(
    input_ids: Tensor, processors: Any, criteria: Any, config: Any, records: list[ScoreRecord] | None
) -> list[SequenceParams]:
    """One a row of the batch."""
    processing = processing_of(processors, bool(config.do_sample))
    by_node = records is not None or not processing.exact
    params: list[SequenceParams] = []
    for index, row in enumerate(input_ids):
        record = None if records is None else records[index]
        place = BatchRow(index, len(input_ids))
        processor = NodeProcessor(list(processors or ()), row, place, record) if by_node else None
        params.append(SequenceParams(processing.sampling, stop_rules_of(criteria, row), processor=processor))
    return params


def _run(engine: LocalEngine, seqs: list[Sequence], streamer: Any) -> None:
    """Generate all of them. What a streamer raises ends the call, as in `generate`: some programs stop one that way."""
    if streamer is None:
        engine.run(seqs)
        return
    feed = _StreamerFeed(streamer)
    try:
        engine.run(seqs, feed.put)
    except PacelineError:
        if feed.error is None:
            raise
    if feed.error is not None:
        raise feed.error
    streamer.end()


class _StreamerFeed:
    """Hands every accepted token to a streamer, one by one as `generate` does. error: what the streamer has raised"""

    def __init__(self, streamer: Any) -> None:
        self._streamer = streamer
        self.error: Exception | None = None

    def put(self, output: RequestOutput | PacelineError) -> None:
        if self.error is not None or isinstance(output, PacelineError):
            return
        try:
            for token in output.token_ids:
                self._streamer.put(torch.tensor([token]))
        except Exception as error:  # a streamer is anyone's code
            self.error = error
            raise


# --- checks -----------------------------------------------------------------------------------------------------------


def _refuse_unsupported(model: Any, config: Any, model_kwargs: dict[str, Any]) -> None:
    if config is None:
        raise OptionError("hf_generate is called by transformers: model.generate(..., custom_generate=hf_generate)")
    if model.config.is_encoder_decoder:
        raise OptionError("hf_generate decodes models without an encoder; call generate without custom_generate")
    if (config.num_beams or 1) > 1:
        raise OptionError("hf_generate generates each sequence once: num_beams must be 1")
    for name, search in UNSUPPORTED_SEARCHES.items():
        if getattr(config, name, None):
            raise OptionError(f"hf_generate does not do {search}: call generate without {name}")
    if model_kwargs.get("inputs_embeds") is not None:
        raise OptionError("hf_generate reads token ids, not inputs_embeds")


def _check_inputs(inputs: dict[str, Any]) -> None:
    """Raise OptionError for an input that would be left out, and so change the output."""
    unknown = sorted(USER_NAMES.get(name, name) for name in inputs.keys() - KNOWN_INPUTS if not _is_empty(inputs[name]))
    if unknown:
        raise OptionError(f"hf_generate reads token ids alone: call generate without {', '.join(unknown)}")


def _check_positions(input_ids: Tensor, inputs: dict[str, Any]) -> None:
    """Raise OptionError for positions that are not those of the mask."""
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


# --- the result -------------------------------------------------------------------------------------------------------


def _pad_token(config: Any) -> int:
    prepared = getattr(config, "_pad_token_tensor", None)
    if prepared is not None:
        return int(prepared)
    return int(config.pad_token_id or 0)


def _records_scores(config: Any) -> bool:
    return bool(config.return_dict_in_generate and (config.output_scores or config.output_logits))


def _in_requested_form(
    sequences: Tensor, config: Any, records: list[ScoreRecord] | None, outputs: ModelOutputs
) -> Any:
    if not config.return_dict_in_generate:
        return sequences
    from transformers.generation.utils import GenerateDecoderOnlyOutput

    scores = _by_position([record.scores for record in records]) if records and config.output_scores else None
    logits = _by_position([record.logits for record in records]) if records and config.output_logits else None
    return GenerateDecoderOnlyOutput(
        sequences=sequences,
        scores=scores,
        logits=logits,
        attentions=outputs.attentions,
        hidden_states=outputs.hidden_states,
        past_key_values=outputs.past_key_values,
    )


def _by_position(rows: list[list[Tensor]]) -> tuple[Tensor, ...]:
    """Of each generated position [batch, vocab]; zeros where a sequence has ended before."""
    longest, zeros = max(map(len, rows)), torch.zeros_like(rows[0][0])
    padded = [row + [zeros] * (longest - len(row)) for row in rows]
    return tuple(torch.stack(position) for position in zip(*padded))


class _IdsOnly:
    """Stands in for a tokenizer where ids go in and ids come out."""

    def get_vocab(self) -> dict[str, int]:
        return {}
