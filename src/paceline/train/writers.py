"""Which writer generates a target's training data."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from paceline.train.batch_generator import BatchGenerators, can_generate
from paceline.train.collect import CollectOptions
from paceline.train.engine_writer import BuildEngine, EngineWriters
from paceline.train.placement import on_gpu
from paceline.train.sequence_writer import WriterFactory


def writers_of(build: BuildEngine, model: PreTrainedModel, tokenizer: Any, options: CollectOptions) -> WriterFactory:
    """A batch of thousands where a GPU can run one, else the engine, which runs every model.

    build: makes an engine of a configuration
    """
    if on_gpu(model.device) and can_generate(model):
        return BatchGenerators(model)
    return EngineWriters(build, model, tokenizer, options)
