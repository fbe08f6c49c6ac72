"""A tokenizer that an earlier start read gives the same ids and characters, and is never used for other files."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from paceline.core.types import ModelInfo, StructuredOutput
from paceline.engines.local.structured_output import GrammarCompiler
from paceline.errors import ModelError, PromptError
from paceline.hub.chat_template import compiled
from paceline.hub.resolved_tokenizer import (
    ResolvedTokenizer,
    prepare_chats,
    read_tokenizer,
    transformers_tokenizer,
)
from paceline.hub.tokenizer import ChatPrompt, Tokenizer, load_tokenizer
from paceline.hub.vocabulary import compare, spellings
from tests.support.tiny import byte_tokenizer

TEXTS = (
    "def add(a, b):\n    return a + b", " leading", "trailing \n\n", "ÄÖ €uro 漢字 \U0001f600", "<s>special</s> <pad>",
    "<|im_start|>user\nHi<|im_end|>", "It 's , really , fine .", "\t\x00\x1b", "a" * 300,
)  # fmt: skip
USER, ANSWER = {"role": "user", "content": "What is <s>?"}, {"role": "assistant", "content": "A token."}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CHATS = (
    ChatPrompt([USER]),
    ChatPrompt([{"role": "system", "content": "Be brief."}, USER, ANSWER, USER], add_generation_prompt=False),
    ChatPrompt([USER], tools=[TOOL]),
    ChatPrompt([USER], documents=[{"title": "T", "text": "x"}], variables={"enable_thinking": False}),
    ChatPrompt([USER, ANSWER], add_generation_prompt=False, continue_final_message=True),
    ChatPrompt([USER], template="{{ messages[0].content }} by another"),
    ChatPrompt([{"role": "user", "content": "x", "when": object()}]),
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))


def sentencepiece_like() -> Any:
    """Unigrams with spaces as ▁, a token in front of every text, and cleaning up."""
    pieces = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), ("▁", -2.0), ("▁It", -1.0), ("▁,", -1.5), (",", -2.0)]
    letters = [(letter, -5.0) for letter in "abcdefghijklmnopqrstuvwxyzAIDT'.()+:\n"]
    backend = Backend(models.Unigram([*pieces, *letters], unk_id=0))
    backend.normalizer = normalizers.NFKC()
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=True, **special)


def with_many_templates() -> Any:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = {"default": "{{ messages[0].content }}", "tool_use": "{{ tools | tojson }}"}
    tokenizer.add_tokens([AddedToken("<|im_start|>", lstrip=True), "plain"])
    tokenizer.add_special_tokens({"extra_special_tokens": ["<|im_end|>"]})
    return tokenizer


def cut_and_padded() -> Any:
    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.enable_truncation(5)
    tokenizer.backend_tokenizer.enable_padding(length=12, pad_id=258, pad_token="<pad>")
    return tokenizer


def splitting_special() -> Any:
    tokenizer = byte_tokenizer()
    tokenizer.split_special_tokens = True
    return tokenizer


def without_template() -> Any:
    tokenizer = sentencepiece_like()
    tokenizer.clean_up_tokenization_spaces = False
    return tokenizer


MAKERS = (byte_tokenizer, sentencepiece_like, with_many_templates, cut_and_padded, splitting_special, without_template)


def resolved(folder: Path) -> ResolvedTokenizer:
    """The tokenizer of a directory that was read before."""
    for _ in range(2):
        if isinstance(tokenizer := read_tokenizer(folder, "tiny"), ResolvedTokenizer):
            break
    assert isinstance(tokenizer, ResolvedTokenizer)
    return tokenizer


def saved(tokenizer: Any, folder: Path) -> Path:
    tokenizer.save_pretrained(folder)
    return folder


def chat_ids(tokenizer: Any, chat: ChatPrompt) -> list[int] | str:
    """The ids of a chat, or the error that says why there are none."""
    try:
        return Tokenizer(tokenizer).encode(chat)
    except PromptError as error:
        return str(error)


def check_equal(folder: Path) -> None:
    """Every text, chat and attribute as transformers has it, each with a tokenizer that has loaded nothing yet."""
    theirs = load_tokenizer(folder, "tiny")
    for text in TEXTS:
        own = resolved(folder)
        assert own(text).input_ids == theirs(text).input_ids
        assert dict(own(text, add_special_tokens=False)) == dict(theirs(text, add_special_tokens=False))
        ids = Tokenizer(own).encode(text)
        assert ids == Tokenizer(theirs).encode(text)
        assert Tokenizer(own).decode(ids) == Tokenizer(theirs).decode(ids)
        assert Tokenizer(own).decode_with_special(ids) == Tokenizer(theirs).decode_with_special(ids)
        assert own._loaded is None
        assert own.decode(ids) == theirs.decode(ids)
    for chat in CHATS:
        assert chat_ids(resolved(folder), chat) == chat_ids(theirs, chat)
    check_same_vocabulary(resolved(folder), theirs)


def check_same_vocabulary(own: ResolvedTokenizer, theirs: Any) -> None:
    for name in ("bos_token", "eos_token", "pad_token", "unk_token", "eos_token_id", "pad_token_id", "all_special_ids"):
        assert getattr(own, name) == getattr(theirs, name), name
    for name in ("chat_template", "special_tokens_map", "added_tokens_decoder", "all_special_tokens"):
        assert getattr(own, name) == getattr(theirs, name), name
    assert own.get_vocab() == theirs.get_vocab() and own.get_added_vocab() == theirs.get_added_vocab()
    assert len(own) == len(theirs) and spellings(own) == spellings(theirs) and compare(own, theirs).same
    for id_ in range(len(theirs) + 2):
        assert own.convert_ids_to_tokens(id_) == theirs.convert_ids_to_tokens(id_)
    assert own._loaded is None
    assert own.convert_ids_to_tokens([1, 2]) == theirs.convert_ids_to_tokens([1, 2])


@pytest.mark.parametrize("maker", MAKERS)
def test_tokenizers_of_every_kind_answer_as_in_transformers(maker: Callable[[], Any], tmp_path: Path) -> None:
    check_equal(saved(maker(), tmp_path / "tiny"))


@pytest.mark.slow
def test_the_default_tokenizer_answers_as_in_transformers(default_folder: Path) -> None:
    check_equal(default_folder)


def test_chats_of_the_default_model_load_nothing(default_folder: Path) -> None:
    tokenizer = resolved(default_folder)
    Tokenizer(tokenizer).encode([USER, ANSWER, USER])
    assert tokenizer._loaded is None


def test_a_prepared_tokenizer_has_compiled_its_template(default_folder: Path) -> None:
    tokenizer = resolved(default_folder)
    compiled.cache_clear()
    prepare_chats(tokenizer)
    assert compiled.cache_info().currsize == 1
    Tokenizer(tokenizer).encode([USER])
    assert compiled.cache_info().misses == 1


def test_preparing_leaves_alone_what_transformers_renders(tmp_path: Path) -> None:
    compiled.cache_clear()
    prepare_chats(load_tokenizer(saved(byte_tokenizer(), tmp_path / "tiny"), "tiny"))
    assert compiled.cache_info().currsize == 0


def test_what_is_not_answered_here_is_transformers(tmp_path: Path) -> None:
    own = resolved(saved(byte_tokenizer(), tmp_path / "tiny"))
    assert own._loaded is None and own.padding_side == "right" and own._loaded is not None
    assert own.tokenize("ab") == ["a", "b"] and own("ab").input_ids == own._loaded("ab").input_ids


def test_a_change_is_seen_by_everything_after_it(tmp_path: Path) -> None:
    folder = saved(byte_tokenizer(), tmp_path / "tiny")
    own = resolved(folder)
    own.add_tokens(["zebra"])
    assert own("zebra").input_ids == [259] and len(own) == 260 and own.get_vocab()["zebra"] == 259
    assert own.get_added_vocab()["zebra"] == 259
    own = resolved(folder)
    own.chat_template = "{{ messages[0].content }}!"
    assert own.decode(Tokenizer(own).encode([USER])) == "What is <s>?!" and own.chat_template.endswith("!")
    own = resolved(folder)
    own.pad_token = "</s>"
    assert own.pad_token_id == own.eos_token_id == 257


def test_copies_are_transformers_own(tmp_path: Path) -> None:
    folder = saved(byte_tokenizer(), tmp_path / "tiny")
    for copied in (copy.copy, copy.deepcopy, lambda tokenizer: pickle.loads(pickle.dumps(tokenizer))):
        tokenizer = copied(resolved(folder))
        assert isinstance(tokenizer, PreTrainedTokenizerFast)
        assert tokenizer("ab").input_ids == byte_tokenizer()("ab").input_ids
    assert isinstance(transformers_tokenizer(resolved(folder)), PreTrainedTokenizerFast)
    assert transformers_tokenizer(tokenizer) is tokenizer


def test_grammars_read_the_same_vocabulary(tmp_path: Path) -> None:
    folder = saved(cut_and_padded(), tmp_path / "tiny")
    info = ModelInfo("tiny", 259, frozenset({257}), 64, 1, 8, "cpu", "float32")
    own, theirs = resolved(folder), load_tokenizer(folder, "tiny")
    output = StructuredOutput("regex", "[a-c]{2}é")
    masks = [GrammarCompiler(tokenizer, info).compile(output).allowed([]).tolist() for tokenizer in (own, theirs)]
    assert own._loaded is None and masks[0] == masks[1] and sum(masks[0]) == 3


# --- which files it is for --------------------------------------------------------------------------------------------


def changed(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: saved(byte_tokenizer(swapped=9), folder),
        lambda folder: changed(folder / "tokenizer_config.json", pad_token="</s>"),
        lambda folder: (folder / "chat_template.jinja").write_text("{{ messages[0].role }}"),
        lambda folder: (folder / "special_tokens_map.json").write_text('{"pad_token": "</s>"}'),
        lambda folder: (folder / "config.json").write_text('{"model_type": "llama"}'),
    ],
)
def test_changed_files_are_read_again(change: Callable[[Path], Any], tmp_path: Path) -> None:
    folder = saved(byte_tokenizer(), tmp_path / "tiny")
    resolved(folder)
    change(folder)
    assert not isinstance(read_tokenizer(folder, "tiny"), ResolvedTokenizer)
    check_equal(folder)


def test_weights_are_not_read_for_it(tmp_path: Path) -> None:
    folder = saved(byte_tokenizer(), tmp_path / "tiny")
    resolved(folder)
    (folder / "model.safetensors").write_bytes(b"other weights")
    assert isinstance(read_tokenizer(folder, "tiny"), ResolvedTokenizer)


def test_damaged_files_are_named_as_ever(tmp_path: Path) -> None:
    folder = saved(byte_tokenizer(), tmp_path / "tiny")
    resolved(folder)
    (folder / "tokenizer.json").write_text('{"model": ')
    with pytest.raises(Exception) as usual:
        load_tokenizer(folder, "tiny")
    with pytest.raises(type(usual.value)) as now:
        read_tokenizer(folder, "tiny")
    assert str(now.value) == str(usual.value)
    (tmp_path / "none").mkdir()
    with pytest.raises(ModelError, match="none has no usable tokenizer"):
        read_tokenizer(tmp_path / "none", "none")


def test_a_damaged_entry_is_made_again(tmp_path: Path) -> None:
    folder = saved(byte_tokenizer(), tmp_path / "tiny")
    resolved(folder)
    (entry,) = (tmp_path / "cache" / "resolved").iterdir()
    whole = entry.read_text()
    for damage in ("", "{}\n{}", whole.partition("\n")[0], whole[:-100], "null\n" + whole.partition("\n")[2]):
        entry.write_text(damage)
        assert not isinstance(read_tokenizer(folder, "tiny"), ResolvedTokenizer)
        assert entry.read_text() == whole


def test_code_of_the_model_is_always_left_to_transformers(tmp_path: Path) -> None:
    folder = saved(byte_tokenizer(), tmp_path / "tiny")
    resolved(folder)
    assert not isinstance(read_tokenizer(folder, "tiny", trust_remote_code=True), ResolvedTokenizer)


def test_a_class_with_methods_of_its_own_is_not_kept(tmp_path: Path) -> None:
    from transformers import CodeLlamaTokenizer

    folder = saved(CodeLlamaTokenizer(), tmp_path / "tiny")
    for _ in range(2):
        assert not isinstance(read_tokenizer(folder, "tiny"), ResolvedTokenizer)
