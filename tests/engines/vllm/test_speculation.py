"""Our methods in vLLM's words, without vLLM."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.config import SpeculativeConfig
from paceline.drafting import registry as drafters
from paceline.engines.vllm import METHODS
from paceline.engines.vllm.speculation import INSTEAD, MOST_AUTO_K, PROPOSER, TRANSLATIONS, USUAL_K, speculative_config
from paceline.errors import OptionError
from paceline.heads.eagle1 import Eagle1Config, Eagle1Head
from paceline.heads.medusa import MedusaConfig, MedusaHeads
from paceline.heads.peagle import PEagleConfig, PEagleHead
from paceline.heads.registry import save_head
from paceline.heads.shipped import shipped_head
from paceline.hub.default import DIRECTORY


def keys_of(method: str, further: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    keys = speculative_config(SpeculativeConfig(method, **options), further or {})
    assert keys is not None
    return keys


def test_every_method_of_ours_is_translated_or_refused_with_what_to_use_instead() -> None:
    known = {*TRANSLATIONS, *INSTEAD, "none"}
    assert {*TRANSLATIONS, "none"} == set(METHODS)
    assert set(drafters.NAMES) <= known, "a new method needs its line in engines/vllm/speculation.py"


@pytest.mark.parametrize("method", sorted(INSTEAD))
def test_what_vllm_lacks_is_refused_by_name_with_what_to_use(method: str) -> None:
    drafter = object() if method == "custom" else None
    with pytest.raises(OptionError, match=rf"no method {method}; use "):
        speculative_config(SpeculativeConfig(method, drafter=drafter), {})


def test_a_name_that_does_not_exist_is_refused_with_those_that_do() -> None:
    with pytest.raises(OptionError, match=r"no method .magic.; vLLM has ngram, .*mtp"):
        keys_of("magic")


def test_no_method_and_no_draft_tokens_are_plain_decoding() -> None:
    assert speculative_config(SpeculativeConfig("none"), {}) is None
    assert speculative_config(SpeculativeConfig("ngram", num_draft_tokens=0), {}) is None


def test_ngram_looks_up_what_our_own_does() -> None:
    keys = keys_of("ngram")
    assert keys == {
        "method": "ngram", "num_speculative_tokens": USUAL_K, "prompt_lookup_max": 4, "prompt_lookup_min": 2,
    }  # fmt: skip
    assert keys_of("ngram", num_draft_tokens=7, draft_options={"longest": 9})["prompt_lookup_max"] == 9


@pytest.mark.parametrize(("name", "value"), [("branches", 2), ("nodes", 3)])
def test_an_option_that_vllm_lacks_is_refused(name: str, value: int) -> None:
    with pytest.raises(OptionError, match=f"method ngram has no option '{name}' on the engine vllm; it has longest"):
        keys_of("ngram", draft_options={name: value})


def test_an_option_of_the_wrong_type_is_refused() -> None:
    with pytest.raises(OptionError, match="longest must be a whole number"):
        keys_of("ngram", draft_options={"longest": "x"})


def test_auto_is_our_proposer_with_the_most_its_policy_may_choose() -> None:
    keys = keys_of("auto")
    assert keys == {"method": "custom_class", "model": PROPOSER, "num_speculative_tokens": MOST_AUTO_K}
    module, _, name = PROPOSER.rpartition(".")
    assert hasattr(__import__(module, fromlist=[name]), name)


def test_a_draft_model_is_named_by_its_directory(tiny_folder: Path) -> None:
    keys = keys_of("draft_model", draft_model=str(tiny_folder), num_draft_tokens=3)
    assert keys == {"method": "draft_model", "num_speculative_tokens": 3, "model": str(tiny_folder)}
    assert keys_of("cross_vocab", draft_model=str(tiny_folder))["use_heterogeneous_vocab"] is True


def test_weights_are_asked_for_where_they_are_needed_and_refused_where_not(tiny_folder: Path) -> None:
    with pytest.raises(OptionError, match="method eagle needs weights"):
        speculative_config(SpeculativeConfig("eagle"), {}, "a model without a head")
    with pytest.raises(OptionError, match="method auto takes no draft model on the engine vllm"):
        keys_of("auto", draft_model=str(tiny_folder))
    with pytest.raises(OptionError, match="not a loaded one"):
        keys_of("draft_model", draft_model=object())
    assert "model" not in keys_of("mtp")


@pytest.mark.parametrize(("rule", "name"), [("token", "standard"), ("block", "block")])
def test_the_acceptance_rules_that_both_have_are_translated(rule: str, name: str) -> None:
    assert keys_of("ngram", acceptance=rule)["rejection_sample_method"] == name


@pytest.mark.parametrize("rule", ["coupled", "lossy-typical"])
def test_the_other_acceptance_rules_are_refused(rule: str) -> None:
    with pytest.raises(OptionError, match=f"no acceptance {rule}; use token or block"):
        keys_of("ngram", acceptance=rule)


def test_further_keys_win() -> None:
    assert keys_of("ngram", {"prompt_lookup_max": 6})["prompt_lookup_max"] == 6


def test_the_head_that_comes_with_paceline_is_used_and_its_kind_is_read_from_its_files() -> None:
    keys = keys_of("eagle")
    assert keys["method"] == "eagle3"
    assert keys["model"] == str(shipped_head("eagle", DIRECTORY))


def test_an_eagle_1_head_stays_one(tmp_path: Path) -> None:
    sizes = Eagle1Config(16, 32, 2, 2, 8, vocab_size=50, draft_vocab_size=50, target_hidden_size=16)
    save_head(Eagle1Head(sizes), tmp_path)
    assert keys_of("eagle", draft_model=str(tmp_path))["method"] == "eagle"


def test_medusa_heads_are_read_in_vllms_layout_and_all_of_them_draft(tmp_path: Path) -> None:
    heads = MedusaHeads(MedusaConfig(num_heads=3, num_layers=1, hidden_size=16, vocab_size=50, draft_vocab_size=50))
    save_head(heads, tmp_path)
    save_head(heads, tmp_path / "vllm", layout="vllm")
    keys = keys_of("medusa", draft_model=str(tmp_path))
    assert keys["model"] == str(tmp_path / "vllm") and keys["num_speculative_tokens"] == 3
    assert keys_of("medusa", draft_model=str(tmp_path), num_draft_tokens=2)["num_speculative_tokens"] == 2


def test_a_p_eagle_head_drafts_all_tokens_in_one_pass(tmp_path: Path) -> None:
    config = PEagleConfig(32, 48, 4, 2, 8, 259, 259, 32, feature_layers=(0, 1, 2), num_layers=2, mask_token_id=255)
    save_head(PEagleHead(config), tmp_path)
    keys = keys_of("eagle", draft_model=str(tmp_path))
    assert keys["method"] == "eagle3" and keys["parallel_drafting"] is True
