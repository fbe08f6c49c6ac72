"""See it work: one prompt with and without speculation, and the figures.

    paceline demo                                                         the default model
    paceline demo "Write a haiku, then repeat it." --method ngram -k 4    a prompt of your own
    paceline demo -m BIG --draft-model SMALL                              drafts from a smaller model
    paceline demo --dtype fp32                                            where speculation may not pay

Both sides use the same model and the same code; one of them drafts. On a CPU the default model runs in int8, where
speculation pays. Accepted draft tokens are green. Decoding is greedy, so both outputs must be the same, token for
token: the last row says whether they are. Exit status 1 if they are not.

The two sides take turns, --repeats times; reading the prompt counts for neither. The speed-up is the median over the
pairs of runs, with the smallest and the largest. More than τ is noise of the machine, and is called so.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from time import perf_counter as clock
from typing import TYPE_CHECKING, Any

from paceline.cli.flags import add_config_flags, config_from_args, open_decoder
from paceline.cli.terminal import add_color_argument, note, show, wants_color
from paceline.config import AUTO, DEFAULT_MODEL, EngineConfig
from paceline.errors import OptionError

if TYPE_CHECKING:
    from paceline.bench.compare import Comparison, TimedRun
    from paceline.core.types import RequestOutput
    from paceline.decoder import SpeculativeDecoder

PROMPT = "Write a Python class Stack with push, pop, peek and is_empty, each with a docstring."
NEW_TOKENS = 128
WARM_UP_TOKENS = 16
REPEATS = 3


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", nargs="?", default=PROMPT, metavar="PROMPT", help="default: a small programming task")
    parser.add_argument("--max-new-tokens", type=int, default=NEW_TOKENS, metavar="N", help=f"default: {NEW_TOKENS}")
    parser.add_argument("--repeats", type=int, default=REPEATS, metavar="N", help=f"pairs of runs; default: {REPEATS}")
    parser.add_argument("--json", action="store_true", help="end with one JSON document on one line")
    add_color_argument(parser)
    add_config_flags(parser, positional_model=False, skip=("prefix_cache_tokens",), default_method=AUTO)


def main(args: argparse.Namespace) -> int:
    from paceline.bench.compare import interleaved

    if args.repeats < 1:
        raise OptionError(f"--repeats must be 1 or more, not {args.repeats}")
    config = demo_config(args)
    method, dtype = str(config.speculative.method), config.model.dtype
    note(f"loading {args.model}{f' in {dtype}' if dtype else ''} …")
    with open_decoder(config) as decoder:
        sides = [DemoSide("plain", decoder, args, 0), DemoSide(method, decoder, args, None)]
        for side in sides:  # neither side pays for what a process does only once
            side.warm_up()
        comparison = interleaved(sides[0].run, sides[1].run, args.repeats)
    _print_table(comparison, method)
    if args.json:
        print(json.dumps(_as_json(comparison, method)))
    return 0 if comparison.identical else 1


def demo_config(args: argparse.Namespace) -> EngineConfig:
    """In int8 for the default model on a CPU: there a pass over eight tokens costs little more than one over one."""
    from paceline.device.properties import chosen_device

    # Without a prefix cache, or the second run would find the prompt of the first one already read.
    config = config_from_args(args, default_method=AUTO, advised=False, prefix_cache_tokens=0)
    model = config.model
    if model.dtype is None and model.model == DEFAULT_MODEL and chosen_device(model.device) == "cpu":
        return config.with_options(dtype="int8")
    return config


@dataclass(slots=True)
class DemoSide:
    """One way to decode. Its first output is shown, its further ones are only timed.

    num_draft_tokens  None: what the flags say
    """

    title: str
    decoder: SpeculativeDecoder
    args: argparse.Namespace
    num_draft_tokens: int | None
    shown: bool = False

    def warm_up(self) -> None:
        for _ in self._stream(WARM_UP_TOKENS):
            pass

    def run(self) -> TimedRun:
        from paceline.bench.compare import TimedRun, timed

        run = TimedRun()
        outputs = timed(self._stream(self.args.max_new_tokens), run, clock)
        if self.shown:
            note(f"{self.title} again …")
            list(outputs)
        else:
            print(f"\n{self.title}\n{'-' * len(self.title)}")
            show(outputs, color=wants_color(self.args.color))
        self.shown = True
        return run

    def _stream(self, max_new_tokens: int) -> Iterator[RequestOutput]:
        messages = [{"role": "user", "content": self.args.prompt}]
        return self.decoder.stream(messages, max_new_tokens=max_new_tokens, num_draft_tokens=self.num_draft_tokens)


def _print_table(comparison: Comparison, method: str) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold", title_justify="left")
    for heading in ("", "tokens", "tokens/s", "spread", "speed-up", "accepted", "τ (tokens a step)"):
        table.add_column(heading, justify="left" if not heading else "right")
    table.add_row("plain", *_cells(comparison.plain, "1.00x"), "1.00")
    tau = f"{comparison.tokens_per_step:.2f}"
    table.add_row(method, *_cells(comparison.speculative, _speedup_cell(comparison)), tau)
    console = Console()
    console.print()
    console.print(table)
    console.print(f"identical: {'yes' if comparison.identical else 'no'}")
    console.print(comparison.sentence(), highlight=False, soft_wrap=True)


def _cells(runs: list[TimedRun], speedup: str) -> list[str]:
    from paceline.bench.statistics import Spread

    stats = runs[0].stats
    accepted = f"{stats.accepted} of {stats.drafted} ({stats.acceptance_rate:.0%})" if stats.drafted else "-"
    rates = Spread.of([run.tokens_per_second for run in runs])
    spread = f"{rates.low:.1f}-{rates.high:.1f}"
    return [str(stats.new_tokens), f"{rates.median:.1f}", spread, speedup, accepted]


def _speedup_cell(comparison: Comparison) -> str:
    if comparison.speedup is not None:
        return f"{comparison.speedup:.2f}x"
    return "noise" if comparison.is_noise else "-"


def _as_json(comparison: Comparison, method: str) -> dict[str, Any]:
    speedups = comparison.speedups
    return {
        "method": method,
        "identical": comparison.identical,
        "speed_up": comparison.speedup,  # None: outputs that differ, or noise
        "noise": comparison.is_noise,
        "measured": None if speedups is None else asdict(speedups),
        "tokens_per_step": comparison.tokens_per_step,
        "repeats": len(comparison.plain),
        "plain": _side_json(comparison.plain),
        "speculative": _side_json(comparison.speculative),
    }


def _side_json(runs: list[TimedRun]) -> dict[str, Any]:
    """The counts of the first run; speeds of all, without the reading of the prompt."""
    return {**runs[0].stats.as_dict(), "decode_tokens_per_second": [run.tokens_per_second for run in runs]}
