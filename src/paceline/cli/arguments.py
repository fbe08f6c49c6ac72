"""Arguments that several words share, and what they mean: the one way from a command line to a decoder."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from paceline.config import ACCEPTANCE, METHODS, DecoderOptions
from paceline.errors import OptionError
from paceline.tuned import adopted

if TYPE_CHECKING:
    from paceline.decoder import SpeculativeDecoder

DEFAULT_NEW_TOKENS = 128
RUNNING = ("target", "device", "dtype", "draft_dtype", "runner", "batch_invariant")  # what add_running_arguments takes


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Which models, and how guesses are made."""
    models = parser.add_argument_group("models")
    add_running_arguments(models)
    models.add_argument("--draft", metavar="MODEL", help="a smaller model of the same vocabulary that guesses")
    models.add_argument("--cache-tokens", type=int, metavar="N", help="tokens whose cache is kept, over all texts")
    guessing = parser.add_argument_group("guessing")
    guessing.add_argument("--method", metavar="M", help=f"{', '.join(METHODS)}")
    guessing.add_argument("-k", "--draft-tokens", metavar="N", default="auto", help="guesses a round: 0 to 128, auto")
    guessing.add_argument("--acceptance", metavar="R", help=f"{', '.join(ACCEPTANCE)}; default: token")
    guessing.add_argument(
        "--option", action="append", default=[], metavar="NAME=VALUE", help="of the method: nodes=24, layer=12"
    )


def add_running_arguments(models: argparse._ArgumentGroup) -> None:
    """Which target, and how models run: for every word that opens one."""
    models.add_argument("--target", default="default", metavar="MODEL", help="`default`, Hub id, directory or .gguf")
    models.add_argument("--device", metavar="D", help="cpu, cuda or cuda:N; default: cuda if there is one")
    models.add_argument("--dtype", metavar="T", help="fp32, bf16, fp16, int8, int4; default: by device")
    models.add_argument("--draft-dtype", metavar="T", help="of the draft; its errors cost guesses, never the text")
    models.add_argument("--runner", metavar="R", default="auto", help="auto, native or hf: who runs the target")
    models.add_argument(
        "--same-bits", action="store_true",
        help="on cuda: a batch writes what its texts are alone, bit for bit; slower"
    )


def running_options(args: argparse.Namespace) -> dict[str, Any]:
    """The arguments of add_running_arguments, as DecoderOptions takes them."""
    return {name: getattr(args, name) for name in RUNNING}


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    """How the next token is chosen, and when a text ends. The defaults are greedy decoding."""
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument("--max-new-tokens", type=int, default=DEFAULT_NEW_TOKENS, metavar="N")
    sampling.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 (greedy) is the default")
    sampling.add_argument("--top-p", type=float, default=1.0, metavar="P")
    sampling.add_argument("--top-k", type=int, default=0, metavar="N")
    sampling.add_argument("--seed", type=int, metavar="N", help="the same seed gives the same text")
    sampling.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this; repeatable")


def decoder_options(args: argparse.Namespace, *, otherwise: str = "none", advised: bool = True) -> DecoderOptions:
    """What the user chose, and what `paceline tune` found out here. Every word that decodes gets its options here.

    otherwise: the method if none was said. advised: a profile may choose one instead.
    """
    method = args.method or (otherwise if args.draft is None else None)
    options = DecoderOptions(
        draft=args.draft,
        method=method,
        num_draft_tokens=args.num_draft_tokens,
        acceptance=args.acceptance,
        kv_cache_tokens=args.kv_cache_tokens,
        method_options=dict(method_option(word) for word in args.option),
        **running_options(args),
    )
    chosen = bool(args.method or args.draft or args.option)
    return adopted(options, chosen=chosen or not advised)


def method_option(word: str) -> tuple[str, Any]:
    """`nodes=24` -> ("nodes", 24). A value that is no number and no truth is a word."""
    name, equals, text = word.partition("=")
    if not equals or not name:
        raise OptionError(f"--option takes NAME=VALUE, not {word!r}")
    try:
        return name, json.loads(text)
    except ValueError:
        return name, text


def open_decoder(options: DecoderOptions) -> SpeculativeDecoder:
    """EngineStats quietly: fetching shows its bars, transformers' own talk while loading is left out."""
    from paceline.decoder import SpeculativeDecoder
    from paceline.hub import locate

    for name in (options.target, options.draft):
        if isinstance(name, str):
            locate(name)
    quiet_transformers()
    chosen = {name: getattr(options, name) for name in DecoderOptions.__dataclass_fields__}
    return SpeculativeDecoder(**chosen)


def quiet_transformers() -> None:
    """No loading bars, no advice: what goes wrong reaches the user as one of our errors."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def settings(args: argparse.Namespace) -> dict[str, Any]:
    """The arguments of add_sampling_arguments, as `generate` and `stream` take them."""
    names = ("max_new_tokens", "temperature", "top_p", "top_k", "seed", "stop")
    return {name: getattr(args, name) for name in names}


def check_settings(args: argparse.Namespace) -> None:
    """Raise OptionError for impossible settings now, not after a model has been loaded."""
    from paceline.core.sampling import SamplingParams

    SamplingParams(temperature=args.temperature, top_p=args.top_p, top_k=args.top_k, seed=args.seed)
