"""Train a drafter for your model: overnight, without a data set.

    paceline train eagle MODEL --out head                     an EAGLE-3 head; the target generates its own data
    paceline train dflash2 MODEL --out head                   a DFlash 2 head: a whole block in one pass
    paceline train eagle MODEL --out head --from my.jsonl     on conversations, texts or questions of your own
    paceline train eagle MODEL --out new --continue-from head adapt a head to a fine-tune, or to a domain
    paceline train eagle --out head --resume                  continue an interrupted training
    paceline train eagle --help                               the settings of one kind
    torchrun --nproc-per-node 4 -m paceline train eagle …     on several GPUs

MODEL is `default`, a Hub id, a directory or a .gguf file. The target's output stays the same, however good the drafter
is; a better one is faster. A data file holds one JSON object per line: {"messages": […]}, {"text": …}, or
{"prompt": …}, which the target answers. With --json the last line on stdout is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from paceline.cli import loading
from paceline.cli.flags import CommandParser, flag_name
from paceline.cli.terminal import note
from paceline.errors import OptionError
from paceline.hub.progress import clock
from paceline.train.registry import trainer_names, trainer_spec

if TYPE_CHECKING:
    from paceline.train.collect import CollectProgress
    from paceline.train.loop import HeldOutMeasurement, TrainingProgress
    from paceline.train.run import TrainingResult, TrainOptions

SECONDS_BETWEEN_LINES = 10.0
TRAINING_DEVICES = ("cuda", "cpu")
NEVER_ZERO = ("steps", "minutes", "batch_tokens", "eval_every", "answer_tokens", "generate_minutes", "max_num_seqs")
COMMAND_ARGUMENTS = ("kind", "out", "resume", "overwrite", "json")  # arguments that are no settings


def configure(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(
        dest="kind", required=True, metavar="KIND", prog="paceline train", parser_class=_TrainerParser,
        help=", ".join(trainer_names())
    )  # fmt: skip
    for name in trainer_names():
        kinds.add_parser(name, trainer=name)


class _TrainerParser(CommandParser):
    """The parser of one kind. It gets its flags when it is used, so that other kinds are not imported.

    Options that are not given stay out of the namespace: a resumed training takes them from its record.
    """

    def __init__(self, trainer: str, **options: Any) -> None:
        super().__init__(**options)
        self._trainer = trainer

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        _add_arguments(self, self._trainer)
        return super().parse_known_args(args, namespace)


def _add_arguments(parser: argparse.ArgumentParser, trainer: str) -> None:
    from paceline.train.collect import CollectOptions
    from paceline.train.loop import LoopOptions
    from paceline.train.run import RunOptions

    spec = trainer_spec(trainer)
    parser.description = f"Train {spec.summary}.\nUse the result with {spec.usage}."
    parser.add_argument("model", nargs="?", default=argparse.SUPPRESS, metavar="MODEL", help="the target (default)")
    parser.add_argument("--out", required=True, metavar="OUT", help="directory of the drafter")
    parser.add_argument("--resume", action="store_true", help="continue the training in OUT, with its settings")
    parser.add_argument("--overwrite", action="store_true", help="forget the training in OUT; its data is kept")
    parser.add_argument("--json", action="store_true", help="end with one JSON document on one line")
    groups = {"run": RunOptions, "data": CollectOptions, "training": LoopOptions, "drafter": spec.options}
    names: set[str] = set()
    for title, options in groups.items():
        _add_flags(parser.add_argument_group(title), options, names)


def _add_flags(group: argparse._ArgumentGroup, options: type, names: set[str]) -> None:
    """One flag of every setting; a setting that two groups share is one flag."""
    from paceline.train.options import flags_of

    for flag in flags_of(options):
        if flag.name not in names:
            names.add(flag.name)
            shown: dict[str, Any] = {"metavar": flag.metavar, "help": flag.help, "dest": flag.name}
            group.add_argument(*flag.spellings, type=flag.kind, default=argparse.SUPPRESS, **shown)


def main(args: argparse.Namespace) -> int:
    options = options_of(args)
    if options.started and not args.resume and not args.overwrite:
        raise OptionError(
            f"{args.out} holds an interrupted or finished training: continue it with --resume, start again with "
            f"--overwrite (its data is kept), or choose another --out"
        )
    result = _train(options, args.resume)
    if result is None:  # one of several processes, and not the one that prints
        return 0
    if args.json:
        print(json.dumps(as_json(result)))
    else:
        _print(result)
    return 0


def options_of(args: argparse.Namespace) -> TrainOptions:
    """The settings given; of a resumed training, the recorded ones unless they are given again."""
    from paceline.train.run import TrainOptions, recorded_options

    values = {name: value for name, value in vars(args).items() if name not in COMMAND_ARGUMENTS}
    for name in NEVER_ZERO:  # where 0 stands for the usual amount in the record
        if values.get(name) == 0:
            raise OptionError(f"{flag_name(name)} must be above 0; leave it out for the usual amount")
    if args.resume:
        recorded = recorded_options(args.out)
        if recorded.get("kind") != args.kind:
            raise OptionError(f"{args.out} holds a training of {recorded.get('kind')}, not of {args.kind}")
        values = {**recorded, **values}
    return TrainOptions.of(args.kind, args.out, values)


def _train(options: TrainOptions, resume: bool) -> TrainingResult | None:
    from paceline.build import build_engine
    from paceline.cli.terminal import quiet_transformers
    from paceline.device.properties import chosen_device
    from paceline.train import distributed
    from paceline.train.run import train

    quiet_transformers()
    with TrainingDisplay() as display:
        try:
            device = chosen_device(options.run.device, TRAINING_DEVICES)
            result = train(options, device, display, build_engine, resume=resume)
            return result if distributed.process_rank().first else None
        except KeyboardInterrupt:
            note(f"\nstopped; continue with: paceline train {options.kind} --out {options.run.out} --resume")
            raise
        finally:
            distributed.leave()


class TrainingDisplay:
    """Shows a training on stderr: a bar under lines of measurements on a terminal, a line now and then elsewhere."""

    def __init__(self) -> None:
        self._bar: Any = None
        self._task: Any = None
        self._last_line = 0.0
        self._measurement: HeldOutMeasurement | None = None

    def __enter__(self) -> TrainingDisplay:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn

            columns = (BarColumn(bar_width=16), TextColumn("{task.fields[line]}"))
            self._bar = Progress(*columns, console=Console(stderr=True, highlight=False))
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def stage(self, title: str) -> None:
        loading.done()
        self._last_line = 0.0
        if self._bar is None:
            self._print_line(title)
            return
        if self._task is not None:
            self._bar.remove_task(self._task)
        self._bar.console.print(title, markup=False)
        self._task = self._bar.add_task("", total=None, line="")

    def collecting(self, progress: CollectProgress) -> None:
        line = f"{progress.num_seqs} sequences, {progress.answer_tokens} answer tokens"
        if progress.seconds:
            line += f", {progress.answer_tokens / progress.seconds:.0f} tokens/s"
        self._show(line, progress.answer_tokens, progress.goal_tokens or None)

    def step(self, progress: TrainingProgress) -> None:
        if self._bar is None:
            self._show(progress_line(progress), progress.fraction, 1.0)
            return
        measurement = progress.measurement
        if measurement is not None and measurement is not self._measurement:
            self._measurement = measurement
            self._bar.console.print(f"step {measurement.step}: {held_out_line(measurement)}", markup=False)
        self._show(speed_line(progress), progress.fraction, 1.0)

    def _show(self, line: str, completed: float, total: float | None) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=completed, total=total, line=line)
        elif time.monotonic() - self._last_line > SECONDS_BETWEEN_LINES:
            self._last_line = time.monotonic()
            self._print_line(line)

    def _print_line(self, line: str) -> None:
        from paceline.train import distributed

        if distributed.process_rank().first:
            print(f"paceline: {line}", file=sys.stderr, flush=True)


def progress_line(progress: TrainingProgress) -> str:
    """One line: how far the training is and how good the drafter."""
    measurement = progress.measurement
    return speed_line(progress) + (f"; {held_out_line(measurement)}" if measurement else "")


def speed_line(progress: TrainingProgress) -> str:
    speed, time_left = progress.tokens_per_second, clock(progress.seconds_left)
    return f"step {progress.step}, loss {progress.loss:.3f}, {speed:.0f} tokens/s, {time_left} left"


def held_out_line(measurement: HeldOutMeasurement) -> str:
    shares = " ".join(f"{share:.0%}" for share in measurement.by_position)
    return f"held out {measurement.tokens_per_step:.2f} tokens per step ({shares})"


def as_json(result: TrainingResult) -> dict[str, Any]:
    """What --json prints."""
    history, options = result.history, result.options
    before, after = history.measurements[0], history.best
    return {
        "kind": options.kind,
        "model": options.run.model,
        "out": options.run.out,
        "num_seqs": result.num_seqs,
        "answer_tokens": result.answer_tokens,
        "parameters": result.parameters,
        "steps": history.step,
        "trained_tokens": history.tokens,
        "seconds": history.seconds,
        "first_loss": history.losses[0] if history.losses else None,
        "last_loss": history.losses[-1] if history.losses else None,
        "tokens_per_step_untrained": before.tokens_per_step,
        "best_step": after.step,
        "tokens_per_step": after.tokens_per_step,
        "acceptance_by_position": after.by_position,
        "files": result.files,
    }


def _print(result: TrainingResult) -> None:
    history = result.history
    before, after = history.measurements[0], history.best
    print(
        f"{history.step} steps, {history.tokens} tokens, {clock(history.seconds)}; {held_out_line(after)}, "
        f"{before.tokens_per_step:.2f} before"
    )
    print(f"{result.options.run.out}: {', '.join(result.files)}")
