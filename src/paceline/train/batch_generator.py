"""Many texts written by one model at once, at a fixed width: how the target makes its own training data.

Every row of the batch works on one text. All rows take one token a step, whatever they are at: a prompt token that is
given, a token of a question being invented, or a token of the answer. A row that is done gets the next plan. Shapes
never change, so on a GPU the whole step is one captured graph; the host looks only every few steps.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin

logger = logging.getLogger(__name__)
STEPS_BETWEEN_LOOKS = 16
LEAST_LIKELY = 3.5  # sampled tokens are at least exp(-3.5) times as likely as the best one: small models ramble
SHORTEST_PIECE = 16
GROUPED = "paceline_grouped"


@dataclass(frozen=True, slots=True)
class Plan:
    """One text to be written.

    prompt       tokens given
    ask_until    the invented question ends at this length at the latest; 0: nothing is invented
    ask_least    and not before this one
    bridge       tokens from the end of the question to the answer; none where the text simply goes on
    heat         temperature of the answer, 0 is greedy
    length       of the whole text, at most
    tag          whatever the caller wants to recognise the text by
    """

    prompt: tuple[int, ...]
    ask_until: int
    ask_least: int
    bridge: tuple[int, ...]
    heat: float
    length: int
    tag: int = 0


@dataclass(frozen=True, slots=True)
class Written:
    """A finished text; the answer starts at `start`."""

    tokens: list[int]
    start: int
    plan: Plan


def grouped_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Attention of one new token a row, in which query heads read the key heads they share without copying them."""
    batch, heads, width, size = query.shape
    shared = key.shape[1]
    folded = query.reshape(batch, shared, heads // shared * width, size)
    scores = folded @ key.transpose(-1, -2) * (options.get("scaling") or size**-0.5)
    weights = (scores if attention_mask is None else scores + attention_mask).softmax(dim=-1, dtype=torch.float32)
    mixed = (weights.to(value.dtype) @ value).reshape(batch, heads, width, size)
    return mixed.transpose(1, 2).contiguous(), None


AttentionInterface.register(GROUPED, grouped_attention)


class _Layer(CacheLayerMixin):
    """Keys and values [rows, heads, length, size]; each row writes at its own place."""

    def __init__(self, length: int, rows: Tensor, places: Tensor) -> None:
        super().__init__()
        self._length, self._rows, self._places = length, rows, places

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        rows, heads, _, _ = key_states.shape
        self.keys = key_states.new_zeros(rows, heads, self._length, key_states.shape[-1])
        self.values = value_states.new_zeros(rows, heads, self._length, value_states.shape[-1])
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None
        self.keys[self._rows, :, self._places] = key_states[:, :, 0]
        self.values[self._rows, :, self._places] = value_states[:, :, 0]
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._length, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return self._length

    def get_max_cache_shape(self) -> int:
        return self._length


class _Rows:
    """The state of all rows, as device tensors that are only ever written in place."""

    def __init__(self, rows: int, length: int, bridge: int, device: torch.device) -> None:
        self.tokens = torch.zeros(rows, length + bridge + 2, dtype=torch.int64, device=device)
        self.bridge = torch.zeros(rows, max(bridge, 1), dtype=torch.int64, device=device)
        integers = torch.zeros(8, rows, dtype=torch.int64, device=device)
        self.place, self.known, self.start, self.limit = integers[0], integers[1], integers[2], integers[3]
        self.ask_until, self.ask_least, self.bridge_size, self.idle = integers[4], integers[5], integers[6], integers[7]
        self.heat = torch.zeros(rows, dtype=torch.float32, device=device)
        self.idle.fill_(1)
        self.limit.fill_(2)

    def assign(self, rows: list[int], plans: list[Plan]) -> None:
        """Put new plans into idle rows."""
        device = self.tokens.device
        where = torch.tensor(rows, device=device)
        self.tokens[where] = _padded([plan.prompt for plan in plans], self.tokens.shape[1]).to(device)
        self.bridge[where] = _padded([plan.bridge for plan in plans], self.bridge.shape[1]).to(device)
        columns = {
            "place": [0] * len(plans),
            "known": [len(plan.prompt) for plan in plans],
            "start": [len(plan.prompt) for plan in plans],
            "limit": [plan.length for plan in plans],
            "ask_until": [plan.ask_until for plan in plans],
            "ask_least": [plan.ask_least for plan in plans],
            "bridge_size": [len(plan.bridge) for plan in plans],
            "idle": [0] * len(plans),
            "heat": [plan.heat for plan in plans],
        }
        for name, values in columns.items():
            column = getattr(self, name)
            column[where] = torch.tensor(values, dtype=column.dtype).to(device)


def _padded(rows: list[tuple[int, ...]], width: int) -> Tensor:
    out = torch.zeros(len(rows), width, dtype=torch.int64)
    for index, row in enumerate(rows):
        out[index, : len(row)] = torch.tensor(row, dtype=torch.int64)
    return out


class Writer:
    """Writes texts with one model. `length` bounds every text, `rows` are written at a time."""

    def __init__(self, model: PreTrainedModel, ends: frozenset[int], rows: int, length: int, bridge: int = 0) -> None:
        self._model = model
        device = next(model.parameters()).device
        self._state = _Rows(rows, length, bridge, device)
        self._ends = torch.tensor(sorted(ends) or [-1], device=device)
        self._columns = torch.arange(length, device=device)
        layers = model.config.get_text_config().num_hidden_layers
        numbers = torch.arange(rows, device=device)
        self._cache = Cache(layers=[_Layer(length, numbers, self._state.place) for _ in range(layers)])
        self._plans: list[Plan | None] = [None] * rows
        self.steps = 0

    @torch.no_grad()
    def write(self, plans: Iterator[Plan], stop: Callable[[], bool]) -> Iterator[Written]:
        """Finished texts in the order in which they end, until `stop` says so or the plans run out."""
        usual = self._model.config._attn_implementation
        self._model.set_attn_implementation(GROUPED)
        try:
            advance = self._captured() if self._state.tokens.is_cuda else self._advance
            while not stop():
                yield from self._exchange(plans)
                if all(plan is None for plan in self._plans):
                    return
                for _ in range(STEPS_BETWEEN_LOOKS):
                    advance()
                self.steps += STEPS_BETWEEN_LOOKS
            yield from self._unfinished()
        finally:
            self._model.set_attn_implementation(usual)

    def _exchange(self, plans: Iterator[Plan]) -> Iterator[Written]:
        """Take what is finished, hand out new plans."""
        idle = self._state.idle.nonzero().flatten()
        rows = idle.tolist()
        columns = (self._state.tokens, self._state.known, self._state.start)
        texts, sizes, starts = (column[idle].tolist() for column in columns)
        fresh = list(itertools.islice(plans, len(rows)))
        result = [self._plans[row] for row in rows]
        for index, row in enumerate(rows):
            self._plans[row] = fresh[index] if index < len(fresh) else None
        if fresh:
            self._state.assign(rows[: len(fresh)], fresh)
        for plan, text, size, start in zip(result, texts, sizes, starts):
            if plan is not None and size > start:
                yield Written(text[:size], start, plan)

    def _unfinished(self) -> Iterator[Written]:
        """Texts that were cut off while being answered: what is there of them is as good as any."""
        state = self._state
        columns = (state.tokens, state.known, state.start, state.ask_until)
        for plan, text, size, start, asking in zip(self._plans, *(column.tolist() for column in columns)):
            if plan is not None and not asking and size - start >= SHORTEST_PIECE:
                yield Written(text[:size], start, plan)

    def _captured(self) -> Callable[[], None]:
        """The step as a CUDA graph: one launch instead of a thousand."""
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):  # every row is idle still, so warming up changes nothing
                self._advance()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                self._advance()
        except RuntimeError as error:  # some models' code waits for the device: then step by step, and slower
            logger.warning("the writing step cannot be captured (%s)", str(error).splitlines()[0])
            torch.cuda.synchronize()
            return self._advance
        return graph.replay

    def _advance(self) -> None:
        """One token for every row that is not idle."""
        state = self._state
        guess = self._pick(self._logits())
        busy = state.idle == 0
        fresh = busy & (state.place + 1 >= state.known)
        asking = fresh & (state.ask_until > 0)
        ended = (guess[:, None] == self._ends).any(dim=-1)
        self._put(guess, fresh)
        self._cross(asking & ((ended & (state.bridge_size > 0)) | (state.place + 2 >= state.ask_until)))
        over = busy & ((fresh & ~asking & ended) | (state.place + 2 >= state.limit))
        state.place.add_((busy & ~over).long())
        state.idle.copy_(torch.where(over, 1, state.idle))

    def _put(self, guess: Tensor, fresh: Tensor) -> None:
        """Append the model's token where nothing is given."""
        state = self._state
        ahead = (state.place + 1)[:, None]
        given = state.tokens.gather(1, ahead)[:, 0]
        state.tokens.scatter_(1, ahead, torch.where(fresh, guess, given)[:, None])
        state.known.copy_(torch.where(fresh, state.place + 2, state.known))

    def _logits(self) -> Tensor:
        state = self._state
        hidden = self._columns[None] > state.place[:, None]
        dtype = self._model.dtype
        mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
        mask.masked_fill_(hidden, torch.finfo(dtype).min)
        output = self._model(
            input_ids=state.tokens.gather(1, state.place[:, None]),
            position_ids=state.place[:, None],
            attention_mask=mask[:, None, None],
            past_key_values=self._cache,
            use_cache=True,
        )
        logits: Tensor = output.logits[:, -1].float()
        return logits

    def _pick(self, logits: Tensor) -> Tensor:
        """Gumbel's trick draws for all rows at once; a heat of 0 is the argmax. Questions are asked at heat 1."""
        state = self._state
        asking = state.ask_until > 0
        early = asking & (state.place + 1 < state.ask_least)
        logits[:, self._ends.clamp(min=0)] += torch.where(early, -1e9, 0.0)[:, None]
        heat = torch.where(asking, 1.0, state.heat)[:, None]
        scaled = logits / heat.clamp(min=1e-3)
        scaled = scaled.masked_fill(scaled < scaled.amax(dim=-1, keepdim=True) - LEAST_LIKELY, -1e9)
        noise = torch.empty_like(scaled).exponential_().log_()
        return (scaled - noise * (heat > 0)).argmax(dim=-1)

    def _cross(self, asked: Tensor) -> None:
        """Where a question is over, what leads to the answer is given, and the answer starts behind it.

        The bridge begins where the question's end token stands, so a question cut at its limit ends like any other.
        """
        state = self._state
        bridged = asked & (state.bridge_size > 0)
        ahead = torch.arange(state.bridge.shape[1], device=asked.device)
        places = state.place[:, None] + 1 + ahead
        inside = bridged[:, None] & (ahead < state.bridge_size[:, None])
        state.tokens.scatter_(1, places, torch.where(inside, state.bridge, state.tokens.gather(1, places)))
        state.known.add_(torch.where(bridged, state.bridge_size - 1, 0))
        state.start.copy_(torch.where(asked, state.known, state.start))
        state.ask_until.copy_(torch.where(asked, 0, state.ask_until))
