"""What training asks of the device it runs on: precision, autocast and free memory."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from paceline.hub.model_config import decoder_sizes

FEWEST_NUM_SEQS, NUM_SEQS_ON_CPU = 16, 32
SEQ_SHARE = 0.6  # of the free memory, for sequences that are generated
Device = torch.device | str


def on_gpu(device: Device) -> bool:
    return torch.device(device).type == "cuda"


def target_dtype(device: Device) -> torch.dtype:
    """The precision of the frozen target: bf16 on a GPU, fp32 on a CPU."""
    return torch.bfloat16 if on_gpu(device) else torch.float32


def autocast(device: torch.device) -> torch.autocast:
    """bf16 on a GPU; a CPU computes in the weights' own fp32."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=on_gpu(device))


def free_bytes(device: Device) -> int:
    """Free memory of a GPU; 0 on a CPU, where nothing is sized by it."""
    return torch.cuda.mem_get_info(device)[0] if on_gpu(device) else 0


def num_seqs_in_memory(model: PreTrainedModel, max_len: int, most: int, reserved: int = 0) -> int:
    """Sequences of so many tokens at a time: by the free memory of a GPU less the reserved bytes, few on a CPU."""
    device, sizes = next(model.parameters()).device, decoder_sizes(model.config)
    if not on_gpu(device):
        return NUM_SEQS_ON_CPU
    token_bytes = sizes.kv_values_per_token * torch.finfo(model.dtype).bits // 8
    # A sequence keeps its cache and, for a moment, several copies of its logits in fp32.
    seq_bytes = max_len * token_bytes + 6 * 4 * sizes.vocab_size
    num_seqs = int(SEQ_SHARE * (free_bytes(device) - reserved) / seq_bytes) // 16 * 16
    return max(FEWEST_NUM_SEQS, min(most, num_seqs))
