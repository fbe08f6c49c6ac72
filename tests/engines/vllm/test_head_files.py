"""Heads that paceline writes, as vLLM's own classes read them: kind, layers, masks, and parameter for parameter."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("vllm")

from paceline.heads.checkpoint import Provenance
from paceline.heads.eagle3 import Eagle3Config, Eagle3Head
from paceline.heads.peagle import PEagleConfig, PEagleHead
from paceline.heads.registry import save_head
from tests.support.dflash import tiny_head
from tests.support.tiny import write_tiny_model

LAYERS = (0, 2, 3)
STACKED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("target"), num_hidden_layers=4)


@pytest.fixture(scope="module", autouse=True)
def one_process() -> Iterator[None]:
    """vLLM builds models inside its groups of processes; here one process is each group."""
    from vllm.distributed import destroy_model_parallel

    yield
    destroy_model_parallel()


def eagle_head() -> nn.Module:
    head = Eagle3Head(Eagle3Config(32, 48, 4, 2, 8, 259, 100, 32, feature_layers=LAYERS))
    head.choose_vocabulary(torch.arange(100) * 2)
    return random_weights(head)


def peagle_head() -> nn.Module:
    config = PEagleConfig(
        32, 48, 4, 2, 8, 259, 100, 32, feature_layers=LAYERS, num_layers=2, mask_token_id=255
    )  # fmt: skip
    head = PEagleHead(config)
    head.choose_vocabulary(torch.arange(100) * 2)
    return random_weights(head)


def random_weights(head: nn.Module) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for weight in head.parameters():
            torch.nn.init.normal_(weight, std=0.3)
    return head.eval().requires_grad_(False)


def vllm_config(target: Path, head: Path, method: str, **further: Any) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    speculative = {"model": str(head), "method": method, "num_speculative_tokens": 3, **further}
    arguments = EngineArgs(
        model=str(target), dtype="float32", enforce_eager=True, max_model_len=128, speculative_config=speculative
    )
    return arguments.create_engine_config()


def vllm_head(config: Any, monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    """The head as vLLM's loader makes it."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
    from vllm.model_executor.model_loader import base_loader, get_model
    from vllm.utils.network_utils import get_open_port

    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)  # there is no accelerator to ask
    monkeypatch.setattr(base_loader, "process_weights_after_loading", lambda *_: None)  # packs them for its kernels
    with set_current_vllm_config(config):
        if not torch.distributed.is_initialized():
            init_distributed_environment(1, 0, f"tcp://127.0.0.1:{get_open_port()}", 0, "gloo")
            ensure_model_parallel_initialized(1, 1)
        model: nn.Module = get_model(vllm_config=config, model_config=config.speculative_config.draft_model_config)
    return model


def parts(name: str) -> tuple[str, ...]:
    """The names of what vLLM has joined into one parameter."""
    for joined, names in STACKED.items():
        if f".{joined}." in name:
            return tuple(name.replace(joined, part) for part in names)
    return (name,)


def differing(model: nn.Module, state: dict[str, Tensor], own_name: Callable[[str], str]) -> list[str]:
    """Parameters of vLLM's head that are not the head's own, and tensors of the head that vLLM has not read."""
    unread, wrong = set(state), []
    for name, value in model.named_parameters():
        names = [own_name(part) for part in parts(name)]
        if names == ["embed_tokens.weight"] and names[0] not in state:
            continue  # taken from the target when the engine starts
        unread -= set(names)
        if not all(part in state for part in names):
            wrong.append(name)
            continue
        expected = torch.cat([state[part] for part in names])
        padded = value[: expected.shape[0]]  # output heads are padded to a multiple of 64 rows
        wrong += [] if torch.equal(padded, expected) else [name]
    return wrong + sorted(unread)


def eagle_name(name: str) -> str:
    name = name.removeprefix("model.").replace("draft_id_to_target_id", "d2t")
    for index in range(8):
        name = name.replace(f"layers.{index}.", "midlayer." if index == 0 else f"further.{index - 1}.")
    return name


@pytest.mark.parametrize("layout", ["original", "speculators"])
def test_vllm_reads_an_eagle_head_parameter_for_parameter(
    layout: str, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = eagle_head()
    save_head(head, tmp_path, layout=layout, provenance=Provenance(str(target)))
    config = vllm_config(target, tmp_path, "eagle3")
    model = vllm_head(config, monkeypatch)
    state = {name: value for name, value in head.state_dict().items() if name != "t2d"}
    assert differing(model, state, eagle_name) == []
    read = config.speculative_config.draft_model_config.hf_config
    nested = getattr(read, "eagle_config", None) or {}
    key = "eagle_aux_hidden_state_layer_ids"
    assert tuple(getattr(read, key, None) or nested[key]) == LAYERS


def test_vllm_reads_a_p_eagle_head_parameter_for_parameter(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = peagle_head()
    save_head(head, tmp_path, provenance=Provenance(str(target)))
    model = vllm_head(vllm_config(target, tmp_path, "eagle3", parallel_drafting=True), monkeypatch)
    state = {name: value for name, value in head.state_dict().items() if name not in ("t2d", "mask_hidden")}
    unused = "model.layers.1.hidden_norm.weight"  # vLLM makes one for every layer, and uses that of the first
    assert differing(model, state, eagle_name) == [unused]
    assert torch.equal(model.get_buffer("mask_hidden").flatten(), head.get_parameter("mask_hidden").flatten())


@pytest.mark.parametrize("layout", ["original", "speculators"])
@pytest.mark.parametrize("causal", [True, None])
def test_vllm_masks_and_reads_a_dflash_head_as_it_was_trained(
    causal: bool | None, layout: str, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = tiny_head(causal=causal)
    save_head(head, tmp_path, layout=layout, provenance=Provenance(str(target)))
    config = vllm_config(target, tmp_path, "dflash")
    model = vllm_head(config, monkeypatch)
    assert model.get_draft_attn_causal() == [bool(causal)] * 2
    inner = config.speculative_config.draft_model_config.hf_config.dflash_config
    assert inner["target_layer_ids"] == [layer - 1 for layer in head.config.feature_layers]
    assert inner["mask_token_id"] == head.config.mask_token_id
    left_out = ("lm_head.weight", "model.mask_embedding")  # the target's, which the engine puts in
    state = head.state_dict()
    found = differing(model, state, lambda name: name.removeprefix("model."))
    assert [name for name in found if name not in left_out] == []
