"""Which runner a transformers model needs, and what it can do there: tried with a few tokens when it is loaded.

The truth is one pass over all tokens without any cache. Row buffers have to give the same for rows of different lengths
and for the nodes of a tree; if they do not, the model runs with its own cache, one sequence a pass, and that has to
give the same for a chain after a state and after a rollback. What no way of rolling back gets right is decoded plainly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from paceline.core.protocols import Runner
from paceline.core.types import Capability, Row
from paceline.errors import CapabilityError, ModelError, OutOfMemory
from paceline.kv.block_manager import BlockManager
from paceline.runners.huggingface import HuggingFaceRunner
from paceline.runners.huggingface_masks import REACH_NAMES
from paceline.runners.huggingface_model import TransformersRunner, token_inputs
from paceline.runners.huggingface_state_runner import HuggingFaceStateRunner, Reading

PREFIX_TOKENS, SMALL_WINDOW = 12, 6  # the prefix is past the small window
ROW_TOKENS = 12  # of all rows after the prefix
MAX_PREFIX_TOKENS = 4096  # a window of another name and beyond this is not crossed
TREE_PARENTS, TREE_PATHS = [-1, -1, 1, 1, 0], ([0], [1], [1, 2], [1, 3], [0, 4])
TOLERANCES = {"float64": 1e-6, "float32": 1e-4}  # relative error; another position is another model
MIN_HALF_TOLERANCE, MAX_HALF_TOLERANCE = 1e-2, 5e-2
MAX_MIXING = 0.1  # relative error by which rows of one pass may change each other, where layers are quantized

ONE_BY_ONE = "its passes over several tokens differ from passes over one"
MIXED_ROWS = "its results depend on what else is in the pass, as those of 8-bit bitsandbytes layers do"


def open_hugging_face(model: PreTrainedModel, name: str, *, blocks: BlockManager | None = None) -> TransformersRunner:
    """The runner that gives the model's own output, with the capabilities that a probe has shown.

    Raises CapabilityError for a model that is not causal, ModelError for one that transformers cannot run on tokens.
    """
    with torch.inference_mode(), small_windows(model.config):
        found = Probe(model, name).findings()
    # The windows have their own sizes again: a runner reads them when it is made.
    if found.reading is None:
        buffers = HuggingFaceRunner(model, name, blocks=blocks)
        buffers.capabilities -= set() if found.trees else {Capability.TREE}
        return buffers
    switch = rope_switch(model.config)
    states = HuggingFaceStateRunner(model, name, found.reading, rope_switch=switch, blocks=blocks)
    states.plain_only = found.plain_only
    return states


@dataclass(frozen=True, slots=True)
class Findings:
    """What a probe has shown. reading: of the model's own cache; None: row buffers."""

    reading: Reading | None
    trees: bool = False
    plain_only: str | None = None


class Probe:
    """A few random tokens, read in every way that decoding reads them."""

    def __init__(self, model: PreTrainedModel, name: str) -> None:
        self._model, self._name = model.eval(), name
        self._ids = random_ids(model, probe_length(model.config) + ROW_TOKENS)
        self._tolerance = 0.0

    def findings(self) -> Findings:
        """Raises CapabilityError or ModelError where the model cannot be decoded at all."""
        self._check_inputs()
        self._tolerance = self._measured_tolerance()
        independent = self._rows_are_independent() and not _has_8bit_layers(self._model)
        if independent and not self._steps_agree():
            raise CapabilityError(
                f"{self._name} ({self._model.config.model_type}) computes one output with transformers' cache and "
                f"another without it, so there is no one text to reproduce"
            )
        if independent and rope_switch(self._model.config) is None:
            buffers = HuggingFaceRunner(self._model, self._name)
            if self._reads_all_batches(buffers):
                return Findings(None, trees=_tried(self._reads_trees, buffers))
        reading = self._reading(independent)
        return Findings(reading, plain_only=_reason(reading, independent))

    # --- the truth ----------------------------------------------------------------------------------------------------

    def _check_inputs(self) -> None:
        """Raise CapabilityError for a model that transformers generates with in another way than by its tokens."""
        ids = token_inputs(self._model, self._ids, 0)["input_ids"]
        try:
            prepared = self._model.prepare_inputs_for_generation(ids)["input_ids"]
        except Exception:  # of models that want more than tokens; the pass itself shows whether they need it
            return
        if prepared.shape != ids.shape:
            raise CapabilityError(f"{self._name} ({self._model.config.model_type}) generates from more than its tokens")

    def _truth(self, ids: list[int]) -> Tensor:
        """Logits of one pass over all tokens, without a cache. [tokens, vocab]"""
        try:
            inputs = token_inputs(self._model, ids, 0)
            logits: Tensor = self._model(**inputs, use_cache=False).logits[0]
            return logits
        except torch.OutOfMemoryError as error:
            raise OutOfMemory(f"{self._name} has no room for a pass: use a smaller dtype") from error
        except Exception as error:  # a model may raise anything at all
            reason = str(error).strip().split("\n")[0] or type(error).__name__
            raise ModelError(f"transformers cannot run {self._name} on tokens alone: {reason}") from error

    def _measured_tolerance(self) -> float:
        """In half precision, a few times what another width of the pass changes."""
        dtype = str(next(self._model.parameters()).dtype).removeprefix("torch.")
        if dtype in TOLERANCES:
            return TOLERANCES[dtype]
        wide, narrow = self._truth(self._ids[:PREFIX_TOKENS]), self._truth(self._ids[: PREFIX_TOKENS // 2])
        noise = relative_error(wide[: PREFIX_TOKENS // 2], narrow)
        return min(max(4 * noise, MIN_HALF_TOLERANCE), MAX_HALF_TOLERANCE)

    def _rows_are_independent(self) -> bool:
        """Whether a token's output is the same whatever comes after it, in a pass of the same size.

        Raises CapabilityError where it is so different that no rounding explains it.
        """
        half = PREFIX_TOKENS // 2
        one, other = self._ids[:PREFIX_TOKENS], [*self._ids[:half], *self._ids[-half:]]
        error = relative_error(self._truth(one)[:half], self._truth(other)[:half])
        if error > MAX_MIXING:
            raise self._not_causal()
        return error < self._tolerance

    def _not_causal(self) -> CapabilityError:
        return CapabilityError(
            f"{self._name} ({self._model.config.model_type}) cannot be continued token by token: its output for a "
            f"token depends on the tokens after it. Choose a causal language model"
        )

    def _agree(self, logits: Tensor, truth: Tensor) -> bool:
        return relative_error(logits, truth) < self._tolerance

    # --- row buffers --------------------------------------------------------------------------------------------------

    def _reads_all_batches(self, runner: Runner) -> bool:
        lengths = sorted({PREFIX_TOKENS, len(self._ids) - ROW_TOKENS})  # the short one first: it costs less to fail
        return all(_tried(self._reads_batches, runner, length) for length in lengths)

    def _reads_batches(self, runner: Runner, length: int) -> bool:
        """Whether rows of different lengths give in one pass what each gives by itself."""
        ids = self._ids
        prefixes, rows = (ids[:length], ids[-2:]), (ids[-12:-9], ids[-9:-4])
        caches = [runner.new_cache(), runner.new_cache()]
        runner.forward([Row.chain(cache, tokens) for cache, tokens in zip(caches, prefixes)])
        output = runner.forward([Row.chain(cache, tokens) for cache, tokens in zip(caches, rows)])
        truths = [self._truth(before + row)[len(before) :] for before, row in zip(prefixes, rows)]
        return all(self._agree(part.logits, truth) for part, truth in zip(output, truths))

    def _reads_trees(self, runner: Runner) -> bool:
        """Whether a node of a tree is at the position of its depth and sees its own path only."""
        prefix, tokens = self._ids[:-ROW_TOKENS], self._ids[-12:-7]
        cache = runner.new_cache()
        runner.forward([Row.chain(cache, prefix)])
        logits = runner.forward([Row(cache, torch.tensor(tokens), TREE_PARENTS)]).logits
        paths = [self._truth(prefix + [tokens[node] for node in path])[-1] for path in TREE_PATHS]
        return self._agree(logits, torch.stack(paths))

    # --- the model's own cache ----------------------------------------------------------------------------------------

    def _steps_agree(self) -> bool:
        """Whether transformers' own generation, token by token, agrees with one pass. True where there is no state."""
        prefix, chain = self._ids[:-ROW_TOKENS], self._ids[-ROW_TOKENS:-7]
        steps = self._by_steps(prefix, chain)
        return steps is None or self._agree(steps, self._truth(prefix + chain)[len(prefix) :])

    def _by_steps(self, prefix: list[int], chain: list[int]) -> Tensor | None:
        """Logits of a chain after a prefix, in passes of one token. None: the model returns no state."""
        runner = HuggingFaceStateRunner(self._model, self._name, Reading.TOKENS)
        cache = runner.new_cache()
        try:
            runner.forward([Row.chain(cache, prefix)])
            return runner.forward([Row.chain(cache, chain)]).logits if cache.state.inputs else None
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
        """Whether a chain after a prefix, and one after a rollback, are right beside another sequence."""
        prefix, chain, other = self._ids[:-ROW_TOKENS], self._ids[-ROW_TOKENS:-7], self._ids[-7:-3]
        cache, neighbour = runner.new_cache(), runner.new_cache()
        runner.forward([Row.chain(cache, prefix), Row.chain(neighbour, other)])
        first = runner.forward([Row.chain(cache, chain)]).logits
        runner.commit(cache, [0, 1])
        second = runner.forward([Row.chain(cache, other)]).logits
        references = [self._reference(runner, prefix, chain), self._reference(runner, prefix, chain[:2] + other)[2:]]
        return self._agree(first, references[0]) and self._agree(second, references[1])

    def _reference(self, runner: HuggingFaceStateRunner, prefix: list[int], chain: list[int]) -> Tensor:
        """Token by token transformers' own generation is the reference, for several tokens a single pass is."""
        if runner.reading is not Reading.TOKENS:
            return self._truth(prefix + chain)[len(prefix) :]
        steps = self._by_steps(prefix, chain)
        if steps is None:
            raise self._not_causal()
        return steps


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
    special = {getattr(config, name, None) for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
    ids = torch.randint(0, size, (4 * count,), generator=torch.Generator().manual_seed(0)).tolist()
    return [token for token in ids if token not in special][:count]


# --- what a config says -----------------------------------------------------------------------------------------------


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
    """Tokens before the rows of the probe: past the largest window that is fixed when a model is built."""
    sizes = config.get_text_config(decoder=True).to_dict()
    known = REACH_NAMES.values()
    windows = [size for name, size in sizes.items() if "window" in name and name not in known and isinstance(size, int)]
    return max([size for size in windows if size <= MAX_PREFIX_TOKENS], default=0) + PREFIX_TOKENS


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
