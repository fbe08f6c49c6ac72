"""A tiny target and heads for it whose weights are solved for, not trained: the linear map from what a head reads to
the target's next state, by least squares. Their layers add nothing, so what counts is what they read.

The final norm of the target scales its channels very differently: states before and after it are not alike.
"""

from __future__ import annotations

import random
import string
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from paceline.heads.dflash import DFlashConfig, DFlashHead
from paceline.heads.eagle1 import Eagle1Config, Eagle1Head
from paceline.heads.eagle3 import Eagle3Config, Eagle3Head
from paceline.heads.medusa import MedusaConfig, MedusaHeads
from paceline.heads.registry import save_head
from paceline.lint.target import StatedText, stated
from paceline.train.corpus import TrainingSequence
from paceline.train.teacher import Teacher
from tests.support.tiny import byte_tokenizer, tiny_llama

LETTERS = string.ascii_lowercase[:24]  # fewer than the target's channels: every map of letters is linear
LENGTH = 256  # of a part of the text with favourite letters of its own
STRAY = 0.4  # share of the letters that are favourites and not the next of the alphabet


def lopsided_llama(remembers: bool = True, strength: float = 3.0) -> Any:
    """Its state is the embedding of the last token and means over all before it: a linear map continues it.

    remembers: without the means, the state is the last token alone; strength: of the first mean
    """
    model = tiny_llama(5, num_hidden_layers=3, initializer_range=0.3)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.down_proj.weight.zero_()
            layer.self_attn.q_proj.weight.zero_()
        model.model.layers[0].self_attn.o_proj.weight.mul_(strength)
        for layer in model.model.layers[2 if remembers else 0 :]:
            layer.self_attn.o_proj.weight.zero_()
        model.model.norm.weight.copy_(torch.randn(32, generator=generator).mul(1.2).exp())
    return model


def letters(parts: int, seed: int, stray: float = STRAY) -> str:
    """Walks through the alphabet that stray to a few letters, others in every part of the text."""
    rng = random.Random(seed)
    text, place = "", 0
    for _ in range(parts):
        favourites = rng.sample(range(len(LETTERS)), 3)
        for _ in range(LENGTH):
            place = rng.choice(favourites) if rng.random() < stray else (place + 1) % len(LETTERS)
            text += LETTERS[place]
    return text


def pieces(text: str) -> list[TrainingSequence]:
    tokens = byte_tokenizer()(text)["input_ids"]
    return [TrainingSequence(tokens[start : start + LENGTH], 1) for start in range(0, len(tokens), LENGTH)]


def training_text(teacher: Teacher, parts: int = 24, stray: float = STRAY) -> StatedText:
    return stated(teacher, pieces(letters(parts, seed=1, stray=stray)))


def solved(inputs: Tensor, outputs: Tensor) -> Tensor:
    """The matrix that maps inputs to outputs best, as a weight [outputs, inputs].

    A small ridge: letters span fewer directions than there are channels.
    """
    x, y = inputs.flatten(0, -2).double(), outputs.flatten(0, -2).double()
    square = x.T @ x
    ridge = 1e-6 * square.diagonal().mean() * torch.eye(square.shape[0], dtype=torch.float64)
    return torch.linalg.solve(square + ridge, x.T @ y).T.float()


def rms(states: Tensor) -> Tensor:
    return states / states.square().mean(dim=-1, keepdim=True).sqrt()


def write_eagle3(folder: Path, text: StatedText, layer: int = 1) -> Path:
    """An EAGLE-3 head that reads one layer, and the embedding through an attention that sees its own row alone:
    constant queries and keys are nearest where the rotary distance is 0."""
    config = Eagle3Config(32, 64, 1, 1, 32, 259, 259, 32, qkv_bias=True, feature_layers=(layer,))
    head = Eagle3Head(config)
    embeddings = text.teacher.embed(text.tokens)
    joined = torch.cat([text.features((layer,))[:, :-1], rms(embeddings[:, 1:])], dim=-1)
    weight = solved(joined, rms(text.last[:, 1:]))
    attention = head.midlayer.self_attn
    with torch.no_grad():
        for projection in (attention.q_proj, attention.k_proj, attention.v_proj):
            projection.weight.zero_()
            projection.bias.zero_()
        attention.q_proj.bias.fill_(8.0)
        attention.k_proj.bias.fill_(8.0)
        attention.v_proj.weight[:, :32] = torch.eye(32)
        attention.o_proj.weight.copy_(weight[:, 32:])
        head.midlayer.mlp.down_proj.weight.zero_()
        head.fc.weight.copy_(weight[:, :32])
        head.norm.weight.copy_(text.teacher.model.model.norm.weight)
        head.lm_head.weight.copy_(text.teacher.model.get_output_embeddings().weight)
    save_head(head, folder)
    return folder


def write_dflash(folder: Path, text: StatedText, layer: int = 1, mask: int = 200, layout: str = "original") -> Path:
    """A block drafter whose row 1 sees the anchor with one attention head and the state before it with the other:
    queries are constants that the rotation turns by one place and by two."""
    head = DFlashHead(DFlashConfig(32, 64, 1, 2, 2, 32, 259, 259, 32, (layer,), 4, mask, attention_bias=True))
    embed, model = text.teacher.embed, text.teacher.model
    joined = torch.cat([rms(embed(text.tokens[:, 1:])), rms(text.features((layer,))[:, :-1])], dim=-1)
    masked = embed(torch.tensor([mask]))
    block = head.layers[0]
    attention = block.self_attn
    with torch.no_grad():
        for projection in (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj):
            projection.weight.zero_()
            projection.bias.zero_()
        attention.k_proj.bias.fill_(1.0)
        ones = torch.ones(1, 2, 1, 32)
        turned = [head.rotary(ones[:, :1], torch.tensor([[-places]])).flatten() for places in (1, 2)]
        attention.q_proj.bias.copy_(torch.cat(turned))
        attention.q_norm.weight.fill_(8.0)
        attention.k_norm.weight.fill_(8.0)
        attention.v_proj.weight.copy_(torch.eye(32).repeat(2, 1))
        attention.o_proj.weight.copy_(solved(joined, rms(text.last[:, 1:]) - masked))
        block.mlp.down_proj.weight.zero_()
        head.fc.weight.copy_(torch.eye(32))
        head.norm.weight.copy_(model.model.norm.weight)
    save_head(head, folder, layout=layout)
    return folder


def read_states(text: StatedText, before_norm: bool) -> Tensor:
    return text.last if before_norm else text.final


def write_eagle1(folder: Path, text: StatedText, before_norm: bool) -> Path:
    """An EAGLE-1 head that reads states before or after the final norm. Its config says after, as published ones do."""
    head = Eagle1Head(Eagle1Config(32, 64, 4, 2, 8, 259, 259, 32))
    embeddings = text.teacher.embed(text.tokens)
    joined = torch.cat([embeddings[:, 1:], read_states(text, before_norm)[:, :-1]], dim=-1)
    with torch.no_grad():
        head.fc.weight.copy_(solved(joined, text.final[:, 1:]))
        head.midlayer.self_attn.o_proj.weight.zero_()
        head.midlayer.mlp.down_proj.weight.zero_()
    save_head(head, folder)
    return folder


def write_mtp(folder: Path, model: Any, text: StatedText, before_norm: bool) -> Path:
    """An MTP head beside the config of its target, under Qwen's names."""
    embeddings = text.teacher.embed(text.tokens)
    joined = torch.cat([rms(embeddings[:, 1:]), rms(read_states(text, before_norm)[:, :-1])], dim=-1)
    layer = dict(model.model.layers[0].state_dict())
    for name in ("self_attn.o_proj.weight", "mlp.down_proj.weight"):
        layer[name] = torch.zeros_like(layer[name])
    ones = torch.ones(32)
    head = {"fc.weight": solved(joined, text.final[:, 1:]), "norm.weight": ones}
    head |= {"pre_fc_norm_embedding.weight": ones, "pre_fc_norm_hidden.weight": ones}
    head |= {f"layers.0.{name}": value for name, value in layer.items()}
    folder.mkdir(parents=True)
    model.config.save_pretrained(folder)
    tensors = {f"mtp.{name}": value.clone().contiguous() for name, value in head.items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


def write_medusa(folder: Path, text: StatedText, layout: str = "original") -> Path:
    """Medusa heads, each the linear map to the state so many tokens further on."""
    heads = MedusaHeads(MedusaConfig(3, 1, 32, 259, 259))
    lm_head = text.teacher.model.get_output_embeddings().weight
    with torch.no_grad():
        for index, head in enumerate(heads.lm_heads, start=1):
            onward = solved(text.final[:, :-index], text.final[:, index:])
            head.get_parameter("weight").copy_(lm_head @ onward)
    save_head(heads, folder, layout=layout)
    return folder
