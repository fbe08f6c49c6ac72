"""Log-probabilities of prompt tokens, taken from the passes that read the prompt.

The row after token i says how likely token i + 1 is. A pass keeps one number and a few alternatives of each row, never
the row itself.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.core.types import RowOutput, TokenLogprob
from paceline.engines.local.request_state import RequestState

ROWS_AT_ONCE = 64  # a softmax in float32 takes as much memory as the logits again


def score_prompt(request: RequestState, output: RowOutput) -> RowOutput:
    """Record the prompt tokens that the rows of a prefill pass predict; returns the output with its last row alone.

    Called once the rows are committed. A preempted sequence reads its prompt again, and what is known is not recorded
    twice.
    """
    seq = request.seq
    assert seq.seq_cache is not None and seq.params.prompt_logprobs is not None
    num_rows, end = output.logits.shape[0], seq.seq_cache.length + 1
    first, known = end - num_rows, len(request.prompt_logprobs) + 1  # the first row predicts token `first`
    tokens = seq.ids[known : min(end, seq.prompt_length)]
    if tokens:
        rows = output.logits[known - first : known - first + len(tokens)]
        request.prompt_logprobs += token_logprobs(rows, tokens, seq.params.prompt_logprobs)
    return RowOutput(output.logits[-1:].clone(), output.hidden, output.features)


def token_logprobs(logits: Tensor, tokens: list[int], top: int) -> list[TokenLogprob]:
    """One entry a row of the logits [tokens, vocab]: tokens[i] under row i."""
    entries: list[TokenLogprob] = []
    for start in range(0, len(tokens), ROWS_AT_ONCE):
        part = tokens[start : start + ROWS_AT_ONCE]
        scores = torch.log_softmax(logits[start : start + len(part)].float(), dim=-1)
        chosen = scores.gather(-1, torch.tensor(part, device=scores.device)[:, None])  # [tokens, 1]
        ranks = (scores > chosen).sum(dim=-1) + 1
        best = scores.topk(top, dim=-1)
        tops = [tuple(zip(*row)) for row in zip(best.indices.tolist(), best.values.tolist())]
        entries += map(TokenLogprob, part, chosen[:, 0].tolist(), tops, ranks.tolist())
    return entries
