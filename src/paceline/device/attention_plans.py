"""Attention of cuDNN compiles a plan for every new shape: 50 ms on the host, where other kernels start at once.

Prompts, and passes of transformers' models, have ever new shapes, so a sequence would pay for it again and again.
torch's setting is one of the whole process: it is changed for as long as an engine loads or steps, in any thread, and
then is what it was.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

import torch

from paceline.device.properties import supports_graphs

LEAST_PLANNED = 1024  # tokens in a pass from which on a plan is worth its 50 ms, where it is kept

_lock = Lock()
_num_users = 0  # that want no plans
_is_usual = True  # torch's setting before the first of them


@contextmanager
def without_plans(device: torch.device | str) -> Iterator[None]:
    """Attention of this device runs kernels that take any shape."""
    if not supports_graphs(device):
        yield
        return
    _begin()
    try:
        yield
    finally:
        _end()


def _begin() -> None:
    global _num_users, _is_usual
    with _lock:
        if not _num_users:
            _is_usual = torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
        _num_users += 1
        torch.backends.cuda.enable_cudnn_sdp(False)


def _end() -> None:
    global _num_users
    with _lock:
        _num_users -= 1
        if not _num_users:
            torch.backends.cuda.enable_cudnn_sdp(_is_usual)


@contextmanager
def with_plans(num_tokens: int) -> Iterator[None]:
    """What is captured here runs many times: with plans again, if it has so many tokens that they are quicker."""
    if not _num_users or num_tokens < LEAST_PLANNED:
        yield
        return
    torch.backends.cuda.enable_cudnn_sdp(_is_usual)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(False)
