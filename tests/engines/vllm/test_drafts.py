"""Draft tokens of one head in vLLM and in our own engine, step for step, on a tiny target.

vLLM runs in this process, so that what its proposer returns can be read. Every start of it takes seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Qwen2Config, Qwen2ForCausalLM

pytest.importorskip("vllm")

from paceline.engines.vllm.arguments import WORKER
from paceline.heads.checkpoint import Provenance
from paceline.heads.dflash import DFlashConfig, DFlashHead
from paceline.heads.eagle3 import Eagle3Config, Eagle3Head
from paceline.heads.peagle import PEagleConfig, PEagleHead
from paceline.heads.registry import save_head
from tests.support.build import sequence, tiny_engine
from tests.support.families import Variant, tiny_family
from tests.support.mtp import add_tensors, edit_config, random_tensors
from tests.support.tiny import byte_tokenizer, write_tiny_model

K, NEW_TOKENS = 3, 12
PROMPTS = [[5, 7, 9, 11, 200, 31], list(range(40, 70))]
SIZES: dict[str, Any] = {"hidden_size": 128, "num_hidden_layers": 4}  # heads of a size that vLLM's CPU kernels have

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("target"), **SIZES)


# --- heads ------------------------------------------------------------------------------------------------------------


def random_weights(head: nn.Module) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for name, weight in head.named_parameters():
            torch.nn.init.normal_(weight, mean=1.0 if "norm" in name else 0.0, std=0.2)
    return head.eval().requires_grad_(False)


def eagle_head() -> nn.Module:
    return random_weights(Eagle3Head(Eagle3Config(128, 96, 4, 2, 32, 259, 259, 128, feature_layers=(1, 2, 3))))


def peagle_head() -> nn.Module:
    config = PEagleConfig(
        128, 96, 4, 2, 32, 259, 259, 128, feature_layers=(1, 2, 3), num_layers=2, mask_token_id=255
    )  # fmt: skip
    return random_weights(PEagleHead(config))


def dflash_head(**variant: Any) -> nn.Module:
    """vLLM runs blocks of num_speculative_tokens + 1 rows whatever the config says: these are as long."""
    config = DFlashConfig(128, 96, 2, 4, 2, 32, 259, 259, 128, (1, 2, 3), K + 1, 255, **variant)
    return random_weights(DFlashHead(config))


HEADS: dict[str, tuple[Callable[[], nn.Module], str, dict[str, Any]]] = {
    "eagle3": (eagle_head, "eagle", {"method": "eagle3"}),
    "p-eagle": (peagle_head, "eagle", {"method": "eagle3", "parallel_drafting": True}),
    "dflash": (dflash_head, "dflash", {"method": "dflash"}),
    "causal dflash": (partial(dflash_head, causal=True), "dflash", {"method": "dflash"}),
}


# --- the two engines --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Generated:
    """What an engine generates for each prompt, and its draft tokens by the number of tokens before them."""

    tokens: list[list[int]] = field(default_factory=list)
    drafts: list[dict[int, list[int]]] = field(default_factory=list)


@pytest.fixture(autouse=True)
def one_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.envs import disable_envs_cache

    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "ERROR")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    monkeypatch.setenv("VLLM_MLA_DISABLE", "1")  # its kernel for CPUs takes latent keys of 576 values and no others
    disable_envs_cache()  # an engine that has run in this process keeps the variables it was started with
    yield
    disable_envs_cache()
    cleanup_dist_env_and_memory()


def vllm_generated(folder: Path, speculative: dict[str, Any], monkeypatch: pytest.MonkeyPatch, k: int = K) -> Generated:
    """vLLM as our engine starts it on a CPU, one prompt after the other."""
    from vllm import LLM, SamplingParams, TokensPrompt
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    llm = LLM(
        str(folder), dtype="float32", enforce_eager=True, max_model_len=128, max_num_seqs=1,
        kv_cache_memory_bytes=1 << 26, enable_prefix_caching=False, worker_extension_cls=WORKER,
        # vLLM's own reference: its kernel for CPUs turns queries wrongly where all heads share one rotated key
        compilation_config={"custom_ops": ["-rotary_embedding"]},
        speculative_config={"num_speculative_tokens": k, **speculative},
    )  # fmt: skip
    steps: list[tuple[int, list[int]]] = []  # new tokens of each step, and the draft after them
    propose = GPUModelRunner.propose_draft_token_ids

    def recorded(self: Any, scheduler_output: Any, sampled: Any, *arguments: Any, **options: Any) -> Any:
        drafts = propose(self, scheduler_output, sampled, *arguments, **options)
        [tokens] = sampled.tolist() if isinstance(sampled, Tensor) else sampled
        [draft] = drafts.tolist() if isinstance(drafts, Tensor) else drafts
        steps.append((sum(token >= 0 for token in tokens), draft))
        return drafts

    monkeypatch.setattr(GPUModelRunner, "propose_draft_token_ids", recorded)
    generated = Generated()
    for prompt in PROMPTS:
        steps.clear()
        sampling = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
        [result] = llm.generate([TokensPrompt(prompt_token_ids=prompt)], sampling, use_tqdm=False)
        lengths = accumulate((count for count, _ in steps), initial=len(prompt))
        generated.tokens.append(list(result.outputs[0].token_ids))
        generated.drafts.append({length: draft for length, (_, draft) in zip(list(lengths)[1:], steps, strict=True)})
    return generated


def own_generated(folder: Path, k: int = K, **options: Any) -> Generated:
    """Our engine, as the library builds it."""
    engine = tiny_engine(folder, num_draft_tokens=k, dtype="float32", **options)
    drafts: dict[int, list[int]] = {}
    propose = engine.parts.drafter.propose

    def recorded(seqs: Any, num_draft_tokens: Any) -> Any:
        trees = propose(seqs, num_draft_tokens)
        drafts.update({len(seq.ids): tree.tokens.tolist() for seq, tree in zip(seqs, trees, strict=True)})
        return trees

    engine.parts.drafter.propose = recorded  # type: ignore[method-assign]
    generated = Generated()
    for prompt in PROMPTS:
        drafts.clear()
        [seq] = engine.run([sequence(list(prompt), NEW_TOKENS)])
        generated.tokens.append(list(seq.generated))
        generated.drafts.append(dict(drafts))
    return generated


def check_equal(theirs: Generated, ours: Generated) -> None:
    """Ours drafts the first token too, and no more than a sequence still takes: what both have drafted is compared."""
    assert theirs.tokens == ours.tokens
    for their_drafts, own in zip(theirs.drafts, ours.drafts, strict=True):
        both = sorted(set(their_drafts) & {length for length, draft in own.items() if draft})
        assert len(both) >= 5 and len({tuple(own[length]) for length in both}) >= 3
        expected = {length: their_drafts[length][: len(own[length])] for length in both}
        assert {length: own[length] for length in both} == expected


@pytest.mark.parametrize("kind", HEADS)
def test_a_head_drafts_the_same_tokens_in_vllm(
    kind: str, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head, method, keys = HEADS[kind]
    save_head(head(), tmp_path, provenance=Provenance(str(target)))
    theirs = vllm_generated(target, {"model": str(tmp_path), **keys}, monkeypatch)
    check_equal(theirs, own_generated(target, method=method, draft_model=str(tmp_path)))


# --- MTP: the target's own checkpoint holds the head ------------------------------------------------------------------


Shapes = dict[str, tuple[int, ...]]
LAYER_SHAPES: Shapes = {
    "self_attn.q_proj.weight": (128, 128), "self_attn.k_proj.weight": (64, 128), "self_attn.v_proj.weight": (64, 128),
    "self_attn.o_proj.weight": (128, 128), "mlp.gate_proj.weight": (96, 128), "mlp.up_proj.weight": (96, 128),
    "mlp.down_proj.weight": (128, 96), "input_layernorm.weight": (128,), "post_attention_layernorm.weight": (128,),
}  # fmt: skip
BIASES: Shapes = {f"self_attn.{part}_proj.bias": (128 if part == "q" else 64,) for part in "qkv"}


def write_with_head(folder: Path, model: Any, head: dict[str, Tensor], **config: Any) -> Path:
    """A target with an MTP head among its tensors."""
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    add_tensors(folder, head)
    edit_config(folder, num_nextn_predict_layers=1, **config)
    return folder


def mimo_target(folder: Path) -> Path:
    """MiMo-7B has Qwen2's layers, and its class is what vLLM tells it by."""
    joined = {"input_proj.weight": (128, 256), **BIASES}
    norms = dict.fromkeys(("token_layernorm.weight", "hidden_layernorm.weight", "final_layernorm.weight"), (128,))
    head = random_tensors("model.mtp_layers.0.", {**LAYER_SHAPES, **joined, **norms})
    return write_with_head(folder, tiny_qwen2(), head, architectures=["MiMoForCausalLM"])


def tiny_qwen2() -> Any:
    config = Qwen2Config(
        vocab_size=259, hidden_size=128, intermediate_size=96, num_hidden_layers=2, head_dim=32,
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False, initializer_range=0.3,
        max_position_embeddings=256, bos_token_id=256, eos_token_id=257, pad_token_id=258,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Qwen2ForCausalLM(config).eval()


def test_an_mtp_head_drafts_the_same_tokens_in_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MiMo's is trained to draft one token, and vLLM asks it for no more."""
    folder = mimo_target(tmp_path)
    theirs = vllm_generated(folder, {"method": "mtp"}, monkeypatch, k=1)
    check_equal(theirs, own_generated(folder, k=1, method="mtp"))


# --- DeepSeek-V3, GLM-4.5: a mixture of experts, and a module that drafts any number of tokens ------------------------


def gated(prefix: str, inner: int) -> Shapes:
    ends = {"gate_proj.weight": (inner, 128), "up_proj.weight": (inner, 128), "down_proj.weight": (128, inner)}
    return {f"{prefix}{name}": shape for name, shape in ends.items()}


EXPERTS: Shapes = {
    "mlp.gate.weight": (4, 128), "mlp.gate.e_score_correction_bias": (4,), **gated("mlp.shared_experts.", 64),
    **{name: shape for index in range(4) for name, shape in gated(f"mlp.experts.{index}.", 64).items()},
}  # fmt: skip
LATENT, NOPE, ROPE, VALUE = 32, 16, 16, 32
LATENT_ATTENTION: Shapes = {
    "self_attn.q_a_proj.weight": (LATENT, 128), "self_attn.q_a_layernorm.weight": (LATENT,),
    "self_attn.q_b_proj.weight": (4 * (NOPE + ROPE), LATENT), "self_attn.kv_a_layernorm.weight": (LATENT,),
    "self_attn.kv_a_proj_with_mqa.weight": (LATENT + ROPE, 128), "self_attn.o_proj.weight": (128, 4 * VALUE),
    "self_attn.kv_b_proj.weight": (4 * (NOPE + VALUE), LATENT),
}  # fmt: skip
OTHERS: Shapes = {
    "eh_proj.weight": (128, 256), "enorm.weight": (128,), "hnorm.weight": (128,), "shared_head.norm.weight": (128,),
    "embed_tokens.weight": (264, 128), "shared_head.head.weight": (264, 128),
    "input_layernorm.weight": (128,), "post_attention_layernorm.weight": (128,),
}  # fmt: skip
GROUPED_ATTENTION: Shapes = {name: shape for name, shape in LAYER_SHAPES.items() if name.startswith("self_attn.")}
LARGER: dict[str, Any] = {
    "hidden_size": 128, "intermediate_size": 96, "moe_intermediate_size": 64, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "routed_scaling_factor": 1.0, "tie_word_embeddings": False,
    "max_position_embeddings": 256,
}  # fmt: skip
LATENT_SIZES: dict[str, Any] = {
    "qk_nope_head_dim": NOPE, "qk_rope_head_dim": ROPE, "v_head_dim": VALUE, "head_dim": ROPE,
    "q_lora_rank": LATENT, "kv_lora_rank": LATENT, "num_key_value_heads": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}  # fmt: skip


def listed_head(attention: Shapes) -> dict[str, Tensor]:
    """A head in the layer behind the last of two."""
    return random_tensors("model.layers.2.", {**OTHERS, **attention, **EXPERTS})


def test_a_head_of_deepseek_drafts_the_same_tokens_in_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Published configs say how experts are chosen, which transformers does not write."""
    model = tiny_family(Variant("deepseek_v3", changes={**LARGER, **LATENT_SIZES}))
    routing = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
    folder = write_with_head(tmp_path, model, listed_head(LATENT_ATTENTION), **routing)
    theirs = vllm_generated(folder, {"method": "mtp"}, monkeypatch)
    check_equal(theirs, own_generated(folder, method="mtp"))


def test_a_head_of_glm_drafts_the_same_tokens_in_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM feeds GLM's state back before the last norm, where it feeds DeepSeek's back after it, as we do for both:
    tokens after the first are the same where that norm scales all values alike."""
    head = listed_head(GROUPED_ATTENTION)
    head["model.layers.2.shared_head.norm.weight"].fill_(1.0)
    model = tiny_family(Variant("glm4_moe", changes={**LARGER, "head_dim": 32}))
    folder = write_with_head(tmp_path, model, head)
    theirs = vllm_generated(folder, {"method": "mtp"}, monkeypatch)
    check_equal(theirs, own_generated(folder, method="mtp"))


# --- Qwen3-Next -------------------------------------------------------------------------------------------------------

QWEN_LAYER: Shapes = {
    **{name: shape for name, shape in LAYER_SHAPES.items() if not name.startswith("mlp.")},
    "self_attn.q_proj.weight": (256, 128), "self_attn.q_norm.weight": (32,), "self_attn.k_norm.weight": (32,),
    "mlp.gate.weight": (4, 128), "mlp.shared_expert_gate.weight": (1, 128), **gated("mlp.shared_expert.", 64),
    **{name: shape for name, shape in EXPERTS.items() if name.startswith("mlp.experts.")},
}  # fmt: skip
QWEN_HEAD: Shapes = {
    "fc.weight": (128, 256), "norm.weight": (128,),
    **dict.fromkeys(("pre_fc_norm_embedding.weight", "pre_fc_norm_hidden.weight"), (128,)),
    **{f"layers.0.{name}": shape for name, shape in QWEN_LAYER.items()},
}  # fmt: skip


def test_a_head_of_qwen3_next_drafts_the_same_tokens_in_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All layers of the target have full attention, as the head's has: vLLM's recurrent layers take bf16 alone on a
    CPU, and rounding would decide which tokens are drafted. Norms are stored around zero."""
    sizes = {name: value for name, value in LARGER.items() if not name.startswith(("n_shared", "first_k", "routed"))}
    layers = {"head_dim": 32, "layer_types": ["full_attention"] * 2, "shared_expert_intermediate_size": 64}
    model = tiny_family(Variant("qwen3_next", changes={**sizes, **layers}))
    stored = random_tensors("mtp.", QWEN_HEAD)
    head = {name: value - 1 if value.ndim == 1 else value for name, value in stored.items()}
    folder = write_with_head(tmp_path, model, head)
    theirs = vllm_generated(folder, {"method": "mtp"}, monkeypatch)
    check_equal(theirs, own_generated(folder, method="mtp", runner="hf"))
