"""Triton's interpreter without what it does again and again.

Before every launch, and before every call of one kernel's function by another, it looks through all of
`triton.language` for what to replace, and for every sum of integers it checks that 32 bits are enough, which no GPU
does. Here the language is replaced once for the process and sums are not checked; what a kernel computes is the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class KeptPatch:
    """In place of the scope that takes replacements back after a launch."""

    def restore(self) -> None:
        """Keep them: every kernel of this process is interpreted."""


def quicken() -> None:
    """Replace the slow parts of the interpreter. A release of Triton that has other parts stays as it is."""
    from triton.runtime import interpreter

    if not {"_patch_lang", "_get_np_dtype", "interpreter_builder"} <= vars(interpreter).keys():
        return
    interpreter._patch_lang = patched_once(interpreter._patch_lang)
    interpreter._get_np_dtype = remembered(interpreter._get_np_dtype)
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)


def patched_once(patch: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The interpreter's own replacement of the language, done once for each module of it that a kernel can see."""
    from triton import language

    done: set[str] = set()

    def patch_what_is_new(kernel: Any) -> Any:
        values = [id(value) for value in kernel.__globals__.values()]
        visible = {module.__name__ for module in (language, language.core) if id(module) in values}
        if not visible <= done:
            patch(kernel)
            done.update(visible)
        return KeptPatch()

    known: dict[Any, Any] = {}

    def patch_known(kernel: Any) -> Any:
        if kernel not in known:
            known[kernel] = patch_what_is_new(kernel)
        return known[kernel]

    return patch_known


def remembered(dtype_of: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """numpy's type for a type of Triton, looked up by the name of its elements' type."""
    known: dict[str, Any] = {}

    def look_up(dtype: Any) -> Any:
        name = dtype.scalar.name
        if name not in known:
            known[name] = dtype_of(dtype)
        return known[name]

    return look_up
