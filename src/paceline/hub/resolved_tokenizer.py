"""A tokenizer of transformers without transformers: its backend, which is the tokenizers package, and a few facts.

`read_tokenizer` is the one place that decides: what an earlier start kept is used where the files are the same, and
transformers reads the directory where they are not. Only tokenizers whose methods are transformers' usual ones are
kept; a class that encodes or decodes in a way of its own is always transformers'.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.hub.chat_template import NOTHING_GIVEN, agrees, compiled, rendered
from paceline.hub.resolved import keep_resolved, read_resolved, resolved_file
from paceline.hub.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as Backend

WEIGHT_SUFFIXES = {".safetensors", ".bin", ".gguf", ".pt", ".pth", ".h5", ".msgpack", ".onnx", ".zip"}
TEMPLATES = "additional_chat_templates/*"
MAX_SOURCE_BYTES = 256 << 20  # of a directory's files beside the weights: reading more takes longer than it saves
NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")
ATTRIBUTES = (*NAMED_TOKENS, *(f"{name}_id" for name in NAMED_TOKENS), "all_special_ids", "all_special_tokens")
# Methods that are answered for here, and what they call. A class that has its own is not kept.
METHODS = (
    "__call__", "_encode_plus", "_convert_encoding", "decode", "_decode", "apply_chat_template", "get_chat_template",
    "get_vocab", "get_added_vocab", "added_tokens_decoder", "convert_ids_to_tokens", "special_tokens_map", "__len__",
)  # fmt: skip
TEMPLATE_SETTINGS = {"chat_template", "continue_final_message", "return_dict", *NOTHING_GIVEN}
OTHER_SETTINGS = {
    "tokenize", "padding", "truncation", "max_length", "return_tensors", "return_assistant_tokens_mask",
    "tokenizer_kwargs", "sanitize_control_tokens", "conversation", "conversations", "messages",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TokenizerFacts:
    """What a tokenizer knows beside its backend.

    attributes            those of ATTRIBUTES
    chat_template         one, several by name, or none
    special_tokens_map    what a template reads of special tokens
    renders               whether its templates render here as they do in transformers
    cleans_up             whether `decode` may remove spaces before punctuation unless it is told not to
    encode_special_tokens whether special tokens in a text are taken for plain characters
    input_names           the fields of an encoding
    """

    attributes: dict[str, Any]
    chat_template: str | dict[str, str] | None
    special_tokens_map: dict[str, str]
    renders: bool
    cleans_up: bool
    encode_special_tokens: bool
    input_names: list[str]


def read_tokenizer(folder: Path, name: str, *, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a model directory, by an earlier start's reading of the same files. Raises ModelError."""
    kept = kept_tokenizer(folder, trust_remote_code=trust_remote_code)
    if kept is None:
        return load_tokenizer(folder, name, trust_remote_code=trust_remote_code)
    return read_kept_tokenizer(folder, name, kept)


def read_kept_tokenizer(folder: Path, name: str, kept: Path) -> Any:
    """The same, from `kept` or, once, by transformers."""
    resolved = _resolved(kept, partial(load_tokenizer, folder, name))
    if resolved is not None:
        return resolved
    loaded = load_tokenizer(folder, name)
    _keep(loaded, kept)
    return loaded


class EncodedText(dict[str, list[int]]):
    """The fields of an encoding, as transformers gives them."""

    @property
    def input_ids(self) -> list[int]:
        return self["input_ids"]


class ResolvedTokenizer:
    """Answers what decoding and serving ask of a tokenizer, as transformers' would.

    Anything else, an attribute that is set included, loads transformers' tokenizer; from then on that one answers
    everything, so that there are never two that differ.
    """

    def __init__(self, facts: TokenizerFacts, backend: Backend, load: Callable[[], Any]) -> None:
        own = {"_facts": facts, "_backend": backend, "_load": load, "_loaded": None, "_lock": threading.Lock()}
        self.__dict__.update(own)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_facts" not in self.__dict__:
            raise AttributeError(name)
        if self._loaded is None and name in self._facts.attributes:
            return copy(self._facts.attributes[name])  # some are lists
        return getattr(self._transformers(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._transformers(), name, value)

    def __len__(self) -> int:
        return len(self._loaded) if self._loaded is not None else self._backend.get_vocab_size(with_added_tokens=True)

    def __bool__(self) -> bool:
        return True

    def __copy__(self) -> Any:
        return copy(self._transformers())

    def __reduce__(self) -> Any:
        return transformers_tokenizer, (self._transformers(),)  # a copy is transformers' own

    def backend_json(self) -> str:
        """The backend as a tokenizer.json, without cutting and padding."""
        return (self._backend if self._loaded is None else copied_backend(self._loaded)).to_str()

    @property
    def chat_template(self) -> Any:
        return self._facts.chat_template if self._loaded is None else self._loaded.chat_template

    @chat_template.setter
    def chat_template(self, template: Any) -> None:
        self._transformers().chat_template = template

    @property
    def special_tokens_map(self) -> dict[str, str]:
        known = self._facts.special_tokens_map if self._loaded is None else self._loaded.special_tokens_map
        return dict(known)

    @property
    def added_tokens_decoder(self) -> dict[int, AddedToken]:
        if self._loaded is not None:
            return dict(self._loaded.added_tokens_decoder)
        return self._backend.get_added_tokens_decoder()

    def get_added_vocab(self) -> dict[str, int]:
        by_id = sorted(self.added_tokens_decoder.items(), key=lambda item: item[0])
        return {token.content: id_ for id_, token in by_id}

    def get_vocab(self) -> dict[str, int]:
        return dict(self._loaded.get_vocab()) if self._loaded is not None else self._backend.get_vocab()

    def convert_ids_to_tokens(self, ids: Any, **settings: Any) -> Any:
        if self._loaded is None and isinstance(ids, int):
            return self._backend.id_to_token(ids)
        return self._transformers().convert_ids_to_tokens(ids, **settings)

    def __call__(self, text: Any = None, **settings: Any) -> Any:
        if self._loaded is not None or not isinstance(text, str) or set(settings) - {"add_special_tokens"}:
            return self._transformers()(text, **settings)
        encoding = self._backend.encode(text, **settings)
        readings = {"input_ids": "ids", "attention_mask": "attention_mask", "token_type_ids": "type_ids"}
        return EncodedText({name: getattr(encoding, readings[name]) for name in self._facts.input_names})

    def decode(
        self,
        token_ids: Any,
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool | None = None,
        **settings: Any,
    ) -> Any:
        cleans_up = clean_up_tokenization_spaces
        if cleans_up is None:
            cleans_up = self._facts.cleans_up
        if self._loaded is not None or cleans_up or settings or not _are_ids(token_ids):
            settings |= {"clean_up_tokenization_spaces": clean_up_tokenization_spaces}
            return self._transformers().decode(token_ids, skip_special_tokens=skip_special_tokens, **settings)
        return self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def apply_chat_template(self, conversation: Any, **settings: Any) -> Any:
        text = self._chat_text(conversation, settings) if self._loaded is None else None
        if text is None:
            return self._transformers().apply_chat_template(conversation, **settings)
        return self(text, add_special_tokens=False)

    def prepare(self) -> None:
        """Compile the model's template, which the first chat would wait for."""
        template = _template(self._facts.chat_template, None)
        if self._loaded is None and self._facts.renders and template is not None:
            compiled(template)

    def _chat_text(self, conversation: Any, settings: Mapping[str, Any]) -> str | None:
        """A chat through the model's own template; None: transformers renders it."""
        template = _template(self._facts.chat_template, settings.get("tools"))
        unusual = settings.get("chat_template") is not None or settings.get("continue_final_message")
        is_messages = type(conversation) is list and conversation and all(type(item) is dict for item in conversation)
        if not self._facts.renders or template is None or unusual or not settings.get("return_dict", True):
            return None
        if not is_messages or OTHER_SETTINGS & set(settings):
            return None
        given = {name: settings.get(name, value) for name, value in NOTHING_GIVEN.items()}
        variables = {name: value for name, value in settings.items() if name not in TEMPLATE_SETTINGS}
        return rendered(template, {**self._facts.special_tokens_map, **variables, **given, "messages": conversation})

    def _transformers(self) -> Any:
        """transformers' own tokenizer, loaded when it is first needed."""
        with self._lock:
            if self._loaded is None:
                self.__dict__["_loaded"] = self._load()
        return self._loaded


def transformers_tokenizer(tokenizer: Any) -> Any:
    """The tokenizer itself, or transformers' own in the place of one that answers for it."""
    return tokenizer._transformers() if isinstance(tokenizer, ResolvedTokenizer) else tokenizer


def prepare_chats(tokenizer: Any) -> None:
    """Do what the first chat would wait for. Other threads may use the tokenizer meanwhile."""
    if isinstance(tokenizer, ResolvedTokenizer):
        tokenizer.prepare()


def _are_ids(token_ids: Any) -> bool:
    return type(token_ids) is list and all(type(token) is int for token in token_ids)


def _template(templates: str | Mapping[str, str] | None, tools: Any) -> str | None:
    """The template that is used where the caller names none."""
    if not isinstance(templates, Mapping):
        return templates
    return templates["tool_use"] if tools is not None and "tool_use" in templates else templates.get("default")


# --- what is kept -----------------------------------------------------------------------------------------------------


def kept_tokenizer(folder: Path, *, trust_remote_code: bool = False) -> Path | None:
    """Where the tokenizer of a directory is kept. Its files beside the weights decide what transformers makes of it."""
    if trust_remote_code:
        return None
    try:
        files = [path for path in (*folder.iterdir(), *folder.glob(TEMPLATES)) if path.is_file()]
        sources = sorted(path for path in files if path.suffix not in WEIGHT_SUFFIXES)
        if sum(path.stat().st_size for path in sources) > MAX_SOURCE_BYTES:
            return None
    except OSError:
        return None
    return resolved_file("tokenizer", sources)


def _resolved(path: Path, load: Callable[[], Any]) -> ResolvedTokenizer | None:
    """The tokenizer that an earlier start kept; None: there is none."""
    from tokenizers import Tokenizer as Backend

    text = read_resolved(path)
    if text is None:
        return None
    head, _, body = text.partition("\n")
    try:
        facts, backend = TokenizerFacts(**json.loads(head)), Backend.from_str(body)
    except Exception:  # damaged, and tokenizers has no type for it: it is read by transformers and kept again
        return None
    backend.encode_special_tokens = facts.encode_special_tokens
    return ResolvedTokenizer(facts, backend, load)


def _keep(tokenizer: Any, path: Path) -> None:
    """Keep a tokenizer for later starts if it is one of transformers' usual ones."""
    if _is_usual(tokenizer):
        keep_resolved(path, f"{json.dumps(asdict(_facts(tokenizer)))}\n{copied_backend(tokenizer).to_str()}")


def copied_backend(tokenizer: Any) -> Backend:
    """The backend of a tokenizer as it encodes a text: neither cut nor padded."""
    from tokenizers import Tokenizer as Backend

    backend = Backend.from_str(tokenizer.backend_tokenizer.to_str())
    backend.no_padding()
    backend.no_truncation()
    return backend


def _is_usual(tokenizer: Any) -> bool:
    from transformers import PreTrainedTokenizerFast

    kind = type(tokenizer)
    if not isinstance(tokenizer, PreTrainedTokenizerFast) or not kind.__module__.startswith("transformers."):
        return False
    usual = all(getattr(kind, name, None) is getattr(PreTrainedTokenizerFast, name, None) for name in METHODS)
    return usual and set(tokenizer.model_input_names) <= {"input_ids", "attention_mask", "token_type_ids"}


def _facts(tokenizer: Any) -> TokenizerFacts:
    special_tokens = dict(tokenizer.special_tokens_map)
    return TokenizerFacts(
        attributes={name: getattr(tokenizer, name) for name in ATTRIBUTES},
        chat_template=tokenizer.chat_template,
        special_tokens_map=special_tokens,
        renders=_renders(tokenizer, special_tokens),
        cleans_up=bool(tokenizer.clean_up_tokenization_spaces),
        encode_special_tokens=bool(tokenizer.split_special_tokens),
        input_names=list(tokenizer.model_input_names),
    )


def _renders(tokenizer: Any, special_tokens: Mapping[str, str]) -> bool:
    """Whether every template of a tokenizer renders here as it does in transformers."""
    templates = tokenizer.chat_template
    listed = list(templates.values()) if isinstance(templates, Mapping) else [templates] if templates else []

    def theirs(template: str, messages: list[dict[str, Any]], **given: Any) -> str | None:
        try:
            return str(tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False, **given))
        except Exception:  # a template is a program of its own and raises anything
            return None

    return bool(listed) and all(agrees(template, special_tokens, partial(theirs, template)) for template in listed)
