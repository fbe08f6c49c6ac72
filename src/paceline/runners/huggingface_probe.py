"""Which runner a transformers model needs, and what it can do there: tried with a few tokens when it is loaded.

The truth is one pass over all tokens without any cache. Row buffers have to give the same for rows of different lengths
and for the nodes of a tree; if they do not, the model runs with its own cache, one sequence a pass, and that has to
give the same for a chain after a state and after a rollback. What no way of rolling back gets right is decoded plainly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import PreTrainedModel

from paceline.core.protocols import Runner
from paceline.core.types import Capability, Row, SequenceCache
from paceline.errors import CapabilityError, ModelError, OutOfMemory
from paceline.kv.block_manager import BlockManager
from paceline.runners.huggingface import HuggingFaceRunner
from paceline.runners.huggingface_masks import REACH_NAMES
from paceline.runners.huggingface_model import TransformersRunner, context_length, token_inputs
from paceline.runners.huggingface_state_runner import HuggingFaceStateRunner, Reading

PREFIX_TOKENS, SMALL_WINDOW = 12, 6  # the prefix is past the small window
ROW_TOKENS, SHORT = 6, 2  # tokens after the prefix, and of a much shorter one
MAX_PREFIX_TOKENS = 4096  # a window of another name and beyond this is not crossed
TREE_PARENTS = [-1, -1, 0, 1, 2, 3]  # two branches, node by node in turn
TOLERANCES = {"float64": 1e-6, "float32": 1e-4}  # relative error; another position is another model
MIN_HALF_TOLERANCE, MAX_HALF_TOLERANCE = 6e-2, 0.15
MAX_MIXING = 0.1  # relative error by which rows of one pass may change each other, where layers are quantized

ONE_BY_ONE = "its passes over several tokens differ from passes over one"
MIXED_ROWS = "its results depend on what else is in the pass, as those of 8-bit bitsandbytes layers do"

_PROBING = Lock()
_EARLIER: WeakKeyDictionary[PreTrainedModel, EarlierProbe] = WeakKeyDictionary()


def open_hugging_face(model: PreTrainedModel, name: str, *, blocks: BlockManager | None = None) -> TransformersRunner:
    """The runner that gives the model's own output, with the capabilities that a probe has shown.

    Raises CapabilityError for a model that is not causal, ModelError for one that transformers cannot run on tokens.
    """
    found = findings_of(model, name)
    if found.reading is None:
        buffers = HuggingFaceRunner(model, name, blocks=blocks)
        buffers.capabilities -= set() if found.trees else {Capability.TREE}
        return buffers
    switch = rope_switch(model.config)
    states = HuggingFaceStateRunner(model, name, found.reading, rope_switch=switch, blocks=blocks)
    states.plain_only = found.plain_only
    return states


def findings_of(model: PreTrainedModel, name: str) -> Findings:
    """What a probe shows; a loaded model that is used again is not probed again."""
    build = f"{model.config._attn_implementation} {next(model.parameters()).dtype}"
    with _PROBING:
        earlier = _EARLIER.get(model)
        if earlier is not None and earlier.build == build:
            return earlier.findings
        with torch.inference_mode(), small_windows(model.config):
            findings = Probe(model, name).findings()
        _EARLIER[model] = EarlierProbe(build, findings)
        return findings


@dataclass(frozen=True, slots=True)
class EarlierProbe:
    """Findings, and the attention code and precision they are of."""

    build: str
    findings: Findings


@dataclass(frozen=True, slots=True)
class Findings:
    """What a probe has shown. reading: of the model's own cache; None: row buffers."""

    reading: Reading | None
    trees: bool = False
    plain_only: str | None = None


class Probe:
    """Two sequences that share a prefix, read in every way that decoding reads them: seven passes for most models."""

    def __init__(self, model: PreTrainedModel, name: str) -> None:
        self._model, self._name = model.eval(), name
        self._length = probe_length(model.config)  # of the shared prefix
        ids = random_ids(model, self._length + 2 * ROW_TOKENS)
        self._one, self._other = ids[:-ROW_TOKENS], ids[: self._length] + ids[-ROW_TOKENS:]
        self._truths = [self._truth(self._one), self._truth(self._other)]
        self._tolerance = self._measured_tolerance()

    def findings(self) -> Findings:
        """Raises CapabilityError where the model cannot be decoded at all."""
        self._check_inputs()
        independent = self._rows_are_independent() and not _has_8bit_layers(self._model)
        if independent and not self._steps_agree():
            raise CapabilityError(
                f"{self._name} ({self._model.config.model_type}) computes one output with transformers' cache and "
                f"another without it, so there is no one text to reproduce"
            )
        if independent and rope_switch(self._model.config) is None:
            buffers = HuggingFaceRunner(self._model, self._name)
            caches = [buffers.new_cache(), buffers.new_cache()]
            if _tried(self._reads_batches, buffers, caches):
                return Findings(None, trees=_tried(self._reads_trees, buffers, caches[0]))
        reading = self._reading(independent)
        return Findings(reading, plain_only=_reason(reading, independent))

    # --- the truth ----------------------------------------------------------------------------------------------------

    def _truth(self, ids: list[int]) -> Tensor:
        """Logits of one pass over all tokens, without a cache. [tokens, vocab]"""
        try:
            logits: Tensor = self._model(**token_inputs(self._model, ids, 0), use_cache=False).logits[0]
            return logits
        except torch.OutOfMemoryError as error:
            raise OutOfMemory(f"{self._name} has no room for a pass: use a smaller dtype") from error
        except Exception as error:  # a model may raise anything at all
            reason = str(error).strip().split("\n")[0] or type(error).__name__
            raise ModelError(f"transformers cannot run {self._name} on tokens alone: {reason}") from error

    def _check_inputs(self) -> None:
        """Raise CapabilityError for a model that transformers generates with in another way than by its tokens."""
        ids = token_inputs(self._model, self._one, 0)["input_ids"]
        try:
            prepared = self._model.prepare_inputs_for_generation(ids)["input_ids"]
        except Exception:  # of models that want more than tokens; the pass itself shows whether they need it
            return
        if prepared.shape != ids.shape:
            raise CapabilityError(f"{self._name} ({self._model.config.model_type}) generates from more than its tokens")

    def _measured_tolerance(self) -> float:
        """In half precision, a few times what a pass of one token rounds otherwise than a wide one."""
        dtype = str(next(self._model.parameters()).dtype).removeprefix("torch.")
        if dtype in TOLERANCES:
            return TOLERANCES[dtype]
        noise = relative_error(self._truth(self._one[:1]), self._truths[0][:1])
        return min(max(4 * noise, MIN_HALF_TOLERANCE), MAX_HALF_TOLERANCE)

    def _rows_are_independent(self) -> bool:
        """Whether a token's output is the same whatever comes after it, in a pass of the same size.

        Raises CapabilityError where it is so different that no rounding explains it.
        """
        error = relative_error(*(truth[: self._length] for truth in self._truths))
        if error > MAX_MIXING:
            raise self._not_causal()
        return error < self._tolerance

    def _not_causal(self) -> CapabilityError:
        return CapabilityError(
            f"{self._name} ({self._model.config.model_type}) cannot be continued token by token: its output for a "
            f"token depends on the tokens after it. Choose a causal language model"
        )

    def _agrees(self, logits: Tensor, start: int, truth: Tensor | None = None) -> bool:
        """Whether logits are those of the tokens from `start` on, of the first sequence unless told."""
        reference = (self._truths[0] if truth is None else truth)[start : start + logits.shape[0]]
        return relative_error(logits, reference) < self._tolerance

    # --- row buffers --------------------------------------------------------------------------------------------------

    def _reads_batches(self, runner: Runner, caches: list[SequenceCache]) -> bool:
        """Whether rows of different lengths give in one pass what each gives by itself."""
        ids, length = self._one, self._length
        runner.forward([Row.chain(cache, ids[:end]) for cache, end in zip(caches, (length, SHORT))])
        rows = [Row.chain(caches[0], ids[length : length + 3]), Row.chain(caches[1], ids[SHORT : SHORT + 5])]
        output = runner.forward(rows)
        return self._agrees(output[0].logits, length) and self._agrees(output[1].logits, SHORT)

    def _reads_trees(self, runner: Runner, cache: SequenceCache) -> bool:
        """Whether a node of a tree is at the position of its depth and sees its own path only."""
        length = self._length
        runner.truncate(cache, length)
        tokens = torch.tensor([token for pair in zip(self._one[length:], self._other[length:]) for token in pair][:6])
        logits = runner.forward([Row(cache, tokens, TREE_PARENTS)]).logits
        return self._agrees(logits[::2], length) and self._agrees(logits[1::2], length, self._truths[1])

    # --- the model's own cache ----------------------------------------------------------------------------------------

    def _steps_agree(self) -> bool:
        """Whether transformers' own generation, token by token, agrees with one pass. True where there is no state."""
        steps = self._by_steps(self._one[: self._length + 1])
        return steps is None or self._agrees(steps, self._length)

    def _by_steps(self, ids: list[int]) -> Tensor | None:
        """Logits after the prefix, in passes of one token. None: the model returns no state."""
        runner = HuggingFaceStateRunner(self._model, self._name, Reading.TOKENS)
        cache = runner.new_cache()
        try:
            runner.forward([Row.chain(cache, ids[: self._length])])
            return runner.forward([Row.chain(cache, ids[self._length :])]).logits if cache.state.inputs else None
        except Exception:  # a model may raise anything at all; it runs without a state, or not at all
            return None

    def _reading(self, independent: bool) -> Reading:
        """What a pass after a state of the model may read."""
        for reading in Reading if independent else (Reading.TOKENS,):
            runner = HuggingFaceStateRunner(self._model, self._name, reading)
            if _tried(self._reads_states, runner):
                return reading
        raise self._not_causal()

    def _reads_states(self, runner: HuggingFaceStateRunner) -> bool:
        """Whether a chain after a prefix, and another after a rollback, are right beside another sequence."""
        length, (one, other) = self._length, self._references(runner.reading)
        cache, neighbour = runner.new_cache(), runner.new_cache()
        runner.forward([Row.chain(cache, self._one[:length]), Row.chain(neighbour, self._other[-SHORT:])])
        first = runner.forward([Row.chain(cache, self._one[length:])]).logits
        runner.commit(cache, [])
        second = runner.forward([Row.chain(cache, self._other[length:])]).logits
        return self._agrees(first, 0, one) and self._agrees(second, 0, other)

    def _references(self, reading: Reading) -> list[Tensor]:
        """For both sequences: token by token transformers' own generation, for several tokens one pass."""
        if reading is not Reading.TOKENS:
            return [truth[self._length :] for truth in self._truths]
        steps = [self._by_steps(ids) for ids in (self._one, self._other)]
        if any(part is None for part in steps):
            raise self._not_causal()
        return [part for part in steps if part is not None]


def _reason(reading: Reading, independent: bool) -> str | None:
    """Why drafts cannot be verified; None: they can."""
    if not independent:
        return MIXED_ROWS
    return ONE_BY_ONE if reading is Reading.TOKENS else None


def _tried(trial: Callable[..., bool], *inputs: Any) -> bool:
    """False where the model refuses to be called this way: then another way is tried."""
    try:
        return trial(*inputs)
    except torch.OutOfMemoryError as error:
        raise OutOfMemory("the model is loaded, and no room is left for a pass: use a smaller dtype") from error
    except Exception:  # a model may raise anything at all
        return False


def relative_error(logits: Tensor, truth: Tensor) -> float:
    """Distance of two [rows, vocab] logits, of which a constant per row means nothing."""
    centred = [part.double() - part.double().mean(dim=-1, keepdim=True) for part in (logits, truth)]
    return float((centred[0] - centred[1]).norm() / centred[1].norm().clamp_min(1e-30))


def random_ids(model: PreTrainedModel, count: int) -> list[int]:
    """Ordinary tokens: some models give a padding token no position."""
    config = model.config.get_text_config(decoder=True)
    size = min(int(getattr(config, "vocab_size", 0) or 1), model.get_input_embeddings().weight.shape[0])
    special = _special_ids(config)
    ids = torch.randint(0, size, (4 * count,), generator=torch.Generator().manual_seed(0)).tolist()
    return [token for token in ids if token not in special][:count]


# --- what a config says -----------------------------------------------------------------------------------------------


def _special_ids(config: Any) -> set[int]:
    """Each may be one id, several or none."""
    ids: set[int] = set()
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        value = getattr(config, name, None)
        ids |= set(value) if isinstance(value, list | tuple) else {value} if value is not None else set()
    return ids


@contextmanager
def small_windows(config: Any) -> Iterator[None]:
    """The windows of attention that masks are made from, made small: a few tokens cross them."""
    config = config.get_text_config(decoder=True)
    windows = {name: getattr(config, name, None) for name in REACH_NAMES.values()}
    large = {name: size for name, size in windows.items() if isinstance(size, int) and size > SMALL_WINDOW}
    try:
        for name in large:
            setattr(config, name, SMALL_WINDOW)
        yield
    finally:
        for name, size in large.items():
            setattr(config, name, size)


def probe_length(config: Any) -> int:
    """Tokens before the rows of the probe: past the largest window that is fixed when a model is built.

    Fewer where the context has no room for them and the rows.
    """
    decoder = config.get_text_config(decoder=True)
    sizes, longest = decoder.to_dict(), context_length(decoder) or MAX_PREFIX_TOKENS
    reachable = min(MAX_PREFIX_TOKENS, longest - 2 * PREFIX_TOKENS)
    windows = [sizes[name] for name in sizes if "window" in name and name not in REACH_NAMES.values()]
    window = max([size for size in windows if isinstance(size, int) and size <= reachable], default=0)
    return max(1, min(window + PREFIX_TOKENS, longest - ROW_TOKENS))


def rope_switch(config: Any) -> int | None:
    """The length past which other rope factors apply to the whole sequence (longrope); None: there is none."""
    config = config.get_text_config(decoder=True)
    ropes = getattr(config, "rope_parameters", None) or {}
    nested = [rope for rope in ropes.values() if isinstance(rope, dict)] or [ropes]
    for rope in nested:
        if rope.get("rope_type") == "longrope":
            original = getattr(config, "original_max_position_embeddings", None)
            return int(rope.get("original_max_position_embeddings") or original or config.max_position_embeddings)
    return None


def _has_8bit_layers(model: Any) -> bool:
    """bitsandbytes looks for outliers in all rows of a pass together; random tokens may have none."""
    return bool(getattr(model, "is_loaded_in_8bit", False))
