"""All that a user may choose about a decoder, validated once."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from paceline.errors import OptionError

METHODS = ("none", "draft", "foreign", "ngram", "suffix", "lookahead", "layerskip", "medusa", "eagle", "auto")
ACCEPTANCE = ("token", "block", "coupled", "lossy-typical")
RUNNERS = ("auto", "native", "hf")
AUTO = "auto"
LARGEST_K = 128


@dataclass(frozen=True, slots=True)
class DecoderOptions:
    """Which models, how they run, and how guesses are made.

    target, draft  a name (`default`, Hub id, directory, .gguf) or a loaded AutoModelForCausalLM
    method         one of METHODS; None: `draft` if a draft was given, else `none`
    num_draft_tokens   guesses a round, or "auto": as many as pay
    acceptance     one of ACCEPTANCE; None: `token`, but a text with a seed is `coupled` where the clock decides what is
                   guessed (num_draft_tokens or method "auto"), so that the same seed gives the same text
    batch_invariant      on CUDA, texts of a batch are bit for bit those written one at a time, guessed for or not; slower
    """

    target: Any = "default"
    draft: Any = None
    method: str | None = None
    num_draft_tokens: int | str = AUTO
    dtype: str | None = None
    draft_dtype: str | None = None
    device: str | None = None
    acceptance: str | None = None
    runner: str = AUTO
    batch_invariant: bool = False
    tokenizer: Any = None
    max_num_seqs: int = 8
    kv_cache_tokens: int | None = None  # tokens the cache holds over all texts; None: enough for max_num_seqs long ones
    trust_remote_code: bool = False
    method_options: dict[str, Any] = field(default_factory=dict)  # of the drafter: branches, layer, nodes, …
    profile: Any = None  # costs measured earlier: core.budget.CostModel, or a Profile that `paceline tune` wrote

    def __post_init__(self) -> None:
        object.__setattr__(self, "method", _method(self.method, self.draft))
        if isinstance(self.draft, str) and self.draft in METHODS:
            object.__setattr__(self, "draft", None)
        if self.acceptance is not None:
            _one_of("acceptance", self.acceptance, ACCEPTANCE)
        _one_of("runner", self.runner, RUNNERS)
        object.__setattr__(self, "num_draft_tokens", checked_num_draft_tokens(self.num_draft_tokens))
        if self.method in ("draft", "foreign") and self.draft is None:
            raise OptionError(
                f"method {self.method} needs a draft model: name one with draft=... (on the command line --draft)"
            )
        if not isinstance(self.max_num_seqs, int) or self.max_num_seqs < 1:
            raise OptionError(f"largest_batch must be 1 or more, not {self.max_num_seqs!r}")
        if self.kv_cache_tokens is not None and self.kv_cache_tokens < 1:
            raise OptionError(f"cache_tokens must be 1 or more, not {self.kv_cache_tokens!r}")

    @property
    def by_the_clock(self) -> bool:
        """Whether what is guessed depends on how long passes take, and so on more than the text and its seed."""
        return self.method != "none" and AUTO in (self.method, self.num_draft_tokens)


def _method(method: str | None, draft: Any) -> str:
    """The method's word; `draft="ngram"` is a way to write method="ngram"."""
    if method is None:
        if draft is None:
            return "none"
        return draft if isinstance(draft, str) and draft in METHODS else "draft"
    _one_of("method", method, METHODS)
    return method


def checked_num_draft_tokens(value: int | str) -> int | str:
    """A k from 0 to 128, or "auto"."""
    if isinstance(value, str) and value != AUTO:
        try:
            value = int(value)
        except ValueError:
            raise OptionError(f"draft tokens (k) must be 0 to {LARGEST_K} or auto, not {value!r}") from None
    return value if isinstance(value, str) else checked_k(value)


def checked_k(value: int) -> int:
    """A number of draft tokens, or an error the user understands."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= LARGEST_K:
        raise OptionError(f"draft tokens (k) must be 0 to {LARGEST_K} or auto, not {value!r}")
    return value


def _one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise OptionError(f"{name} must be one of {', '.join(known)}; not {value!r}")
