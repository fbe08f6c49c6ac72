"""Everything paceline raises on purpose, and nothing else.

PacelineError                 catch this to catch all of them
├── OptionError               a value the user chose is not possible
│   └── PromptError           the prompt is empty or not a prompt
│       └── ContextLengthExceeded  prompt and answer do not fit the model or its cache
├── ModelError                something about a model's files or its kind
│   ├── ModelNotFound         no such name, directory or file
│   ├── FetchError            it exists, but could not be obtained
│   ├── WeightsError          files are there and are damaged, incomplete or unsafe to open
│   └── CapabilityError          the model cannot do what the method needs
├── PairError                 target and draft do not fit together
├── OutOfMemory               names the knob that makes it smaller
├── MissingExtra              an optional package is needed; the message has the pip line of the README
├── StepFailed               the model broke while it was writing; only the texts of that round are lost
├── TrainingDiverged          the loss of a training is no longer a number
├── EngineFailed              the engine's worker has died; nothing it was asked for can be generated
│   └── EngineRestarting      … and the engine is being opened again
└── EngineClosed              the engine was asked to work after it was closed

Every message is written for the person at the keyboard: what is wrong, and what to do about it.
"""

from __future__ import annotations


class PacelineError(Exception):
    """The root of all errors raised on purpose."""


class OptionError(PacelineError, ValueError):
    """A value the user chose is not possible."""


class PromptError(OptionError):
    """The prompt is empty, or not a prompt at all."""


class ContextLengthExceeded(PromptError):
    """Prompt and answer do not fit the model's context or its cache.

    num_tokens, limit  of the prompt and of the context, where they are known
    asked_tokens       of the answer, where the prompt alone would fit; else None
    """

    def __init__(
        self,
        message: str,
        num_tokens: int | None = None,
        limit: int | None = None,
        *,
        asked_tokens: int | None = None,
    ) -> None:
        super().__init__(message)
        self.num_tokens, self.limit, self.asked_tokens = num_tokens, limit, asked_tokens


class ModelError(PacelineError):
    """Something about a model's files or its kind."""


class ModelNotFound(ModelError):
    """No such name, directory or file."""


class FetchError(ModelError):
    """The model exists but could not be obtained."""


class WeightsError(ModelError):
    """Weights are there, but damaged, incomplete or unsafe to open."""


class CapabilityError(ModelError):
    """The model cannot do what the chosen method needs."""


class PairError(PacelineError):
    """Target and draft do not fit together."""


class OutOfMemory(PacelineError, MemoryError):
    """KVManager ran out; the message names the knob."""


class StepFailed(PacelineError, RuntimeError):
    """The model broke while it was writing."""


class TrainingDiverged(PacelineError, ArithmeticError):
    """The loss is no longer a number."""


class EngineFailed(PacelineError, RuntimeError):
    """The engine's worker has died."""


class EngineRestarting(EngineFailed):
    """The engine's worker has died, and the engine is being opened again."""


class EngineClosed(PacelineError, RuntimeError):
    """The engine was asked to work after it was closed."""


class MissingExtra(PacelineError, ImportError):
    """An optional package is needed."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(f"this needs {package}: in paceline's checkout, pip install '.[{extra}]'")
