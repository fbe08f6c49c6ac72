"""Train a drafter for your model: overnight, with no data set at all.

    paceline train eagle --target MODEL --out head            an EAGLE-3 head; the target writes its own data
    paceline train medusa --target MODEL --out heads          Medusa heads
    paceline train draft --target MODEL --out draft           a small Llama, distilled from the target
    paceline train exit --target MODEL --out adapter          an adapter to leave the target after a layer
    paceline train eagle --data my.jsonl --out head           on conversations, texts or questions of your own
    paceline train eagle --out head --resume                  go on where a killed run stopped
    torchrun --nproc-per-node 4 -m paceline train eagle …     on several GPUs

Use what comes out with --method eagle --draft head, --method medusa --draft heads, --draft draft, or --method layerskip
--draft adapter. The target's text stays the same, however good the drafter is; a better one is faster.

A data file holds one JSON object a line: {"messages": […]}, {"text": …}, or {"prompt": …}, which the target answers.
With --json the last line on stdout is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import TYPE_CHECKING, Any

from paceline.cli.terminal import note
from paceline.errors import OptionError

if TYPE_CHECKING:
    from paceline.train.collect import Progress
    from paceline.train.loop import Measurement, TrainingProgress
    from paceline.train.run import Trained, TrainOptions

KINDS = ("eagle", "medusa", "draft", "exit")
SECONDS_BETWEEN_LINES = 10.0
OWN = ("resume", "overwrite", "json")  # arguments that are no part of the training's options


def configure(parser: argparse.ArgumentParser) -> None:
    """Options that are not given stay out of the namespace: a resumed training takes them from its record."""
    parser.add_argument("word", choices=KINDS, help="what to train")
    parser.add_argument("--out", required=True, metavar="DIR", help="where the drafter goes")
    parser.add_argument("--resume", action="store_true", help="go on with the training in DIR, with its options")
    parser.add_argument("--overwrite", action="store_true", help="forget the training in DIR; its texts are kept")
    parser.add_argument("--json", action="store_true", help="end with one JSON document on one line")
    _add_data(_Unsaid(parser.add_argument_group("data")))
    _add_training(_Unsaid(parser.add_argument_group("training")))
    _add_shape(_Unsaid(parser.add_argument_group("shape of the drafter")))


class _Unsaid:
    """A group of arguments without defaults."""

    def __init__(self, group: argparse._ArgumentGroup) -> None:
        self._group = group

    def add(self, name: str, metavar: str, kind: type, output: str) -> None:
        self._group.add_argument(name, type=kind, metavar=metavar, default=argparse.SUPPRESS, help=output)


def _add_data(group: _Unsaid) -> None:
    group.add("--target", "MODEL", str, "the model to draft for: `default`, Hub id, directory or .gguf")
    group.add("--data", "FILE", str, "JSONL of conversations, texts or prompts; none: the target writes its own")
    group.add("--texts", "DIR", str, "where texts are kept and found again (OUT/texts)")
    group.add("--tokens", "N", int, "answer tokens the target writes (4000000 on a GPU, 100000 on a CPU)")
    group.add("--write-minutes", "M", float, "the target writes at most so long")
    group.add("--longest", "N", int, "tokens of a text at most (1152)")
    group.add("--rows", "N", int, "texts written at a time (by the memory there is)")


def _add_training(group: _Unsaid) -> None:
    group.add("--steps", "N", int, "steps of training (4000 on a GPU, 1000 on a CPU)")
    group.add("--minutes", "M", float, "train at most so long")
    group.add("--batch-tokens", "N", int, "tokens a step (16384 on a GPU, 2048 on a CPU)")
    group.add("--rate", "R", float, "highest learning rate (0.001)")
    group.add("--greedy", "S", float, "share of the loss for the likeliest token alone, 0 to 1 (0.5)")
    group.add("--save-every", "N", int, "steps between checkpoints, and at least every two minutes (250)")
    group.add("--measure-every", "N", int, "steps between measurements (a twentieth of the steps)")
    group.add("--seed", "N", int, "of texts, order and weights (0)")
    group.add("--device", "D", str, "cpu, cuda or cuda:N (cuda if there is one)")


def _add_shape(group: _Unsaid) -> None:
    group.add("--layers", "N", int, "draft: layers (4); medusa: residual parts of a head (1)")
    group.add("--width", "N", int, "draft: hidden size (256); exit: bottleneck (2 x target); eagle: feed-forward part")
    group.add("--vocabulary", "N", int, "tokens it can say: eagle (8192), medusa and draft (all)")
    group.add("--layer", "E", int, "exit: leave the target after this layer (a third of them)")
    group.add("--heads", "N", int, "medusa: tokens guessed ahead (4)")
    group.add("--unroll", "N", int, "eagle: drafting steps a training step goes through (5)")


def main(args: argparse.Namespace) -> int:
    options = options_of(args)
    if options.begun and not args.resume and not args.overwrite:
        raise OptionError(
            f"{args.out} holds a training that was begun: go on with --resume, begin anew with --overwrite "
            f"(texts are kept), or choose another --out"
        )
    result = _train(options, args.resume)
    if result is None:  # one of several distributed, and not the one that speaks
        return 0
    if args.json:
        print(json.dumps(document(result)))
    else:
        _print(result)
    return 0


def options_of(args: argparse.Namespace) -> TrainOptions:
    """What was said; of a resumed training, what was said then unless it is said anew."""
    from paceline.train.run import TrainOptions, recorded

    output = {name: value for name, value in vars(args).items() if name not in OWN}
    if not args.resume:
        return TrainOptions(**output)
    before = recorded(args.out)
    if before.get("word") != args.word:
        raise OptionError(f"{args.out} holds a training of {before.get('word')}, not of {args.word}")
    return TrainOptions(**{**before, **output})


def _train(options: TrainOptions, resume: bool) -> Trained | None:
    from paceline.build import chosen_device
    from paceline.cli.arguments import quiet_transformers
    from paceline.train import distributed
    from paceline.train.run import train

    quiet_transformers()
    with Screen() as screen:
        try:
            result = train(options, chosen_device(options.device), screen, resume=resume)
            return result if distributed.share().first else None
        except KeyboardInterrupt:
            note(f"\nstopped; go on with: paceline train {options.word} --out {options.out} --resume")
            raise
        finally:
            distributed.leave()


class Screen:
    """Shows a training on stderr: on a terminal a bar under lines of measurements, elsewhere a line now and then."""

    def __init__(self) -> None:
        self._bar: Any = None
        self._task: Any = None
        self._spoken = 0.0
        self._measured: Measurement | None = None

    def __enter__(self) -> Screen:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn

            columns = (BarColumn(bar_width=16), TextColumn("{task.fields[said]}"))
            self._bar = Progress(*columns, console=Console(stderr=True, highlight=False))
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def stage(self, text: str) -> None:
        self._spoken = 0.0
        if self._bar is None:
            if self._first():
                print(f"paceline: {text}", file=sys.stderr, flush=True)
            return
        if self._task is not None:
            self._bar.remove_task(self._task)
        self._bar.console.print(text, markup=False)
        self._task = self._bar.add_task("", total=None, output="")

    def writing(self, progress: Progress) -> None:
        speed = progress.tokens / progress.seconds if progress.seconds else 0.0
        output = f"{progress.texts} texts, {progress.tokens} answer tokens"
        self._show(output + (f", {speed:.0f} a second" if speed else ""), progress.tokens, progress.wanted or None)

    def step(self, moment: TrainingProgress) -> None:
        if self._bar is None:
            self._show(told(moment), moment.progress, 1.0)
            return
        if moment.measured is not None and moment.measured is not self._measured:
            self._measured = moment.measured
            self._bar.console.print(f"step {moment.measured.step}: {held_out(moment.measured)}", markup=False)
        self._show(pace(moment), moment.progress, 1.0)

    def _show(self, output: str, result: float, total: float | None) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=result, total=total, output=output)
        elif time.monotonic() - self._spoken > SECONDS_BETWEEN_LINES and self._first():
            self._spoken = time.monotonic()
            print(f"paceline: {output}", file=sys.stderr, flush=True)

    def _first(self) -> bool:
        from paceline.train import distributed

        return distributed.share().first


def told(moment: TrainingProgress) -> str:
    """One line: where the training is."""
    return pace(moment) + (f"; {held_out(moment.measured)}" if moment.measured else "")


def pace(moment: TrainingProgress) -> str:
    speed, left = moment.tokens_per_second, _clock(moment.seconds_left)
    return f"step {moment.step}, loss {moment.loss:.3f}, {speed:.0f} tokens/s, {left} left"


def held_out(measured: Measurement) -> str:
    places = " ".join(f"{share:.0%}" for share in measured.by_position)
    return f"held out {measured.tokens_per_step:.2f} tokens a pass ({places})"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def document(result: Trained) -> dict[str, Any]:
    """What --json prints."""
    history, options = result.history, result.options
    before, after = history.measured[0], history.measured[-1]
    return {
        "word": options.word,
        "target": options.target,
        "out": options.out,
        "texts": result.texts,
        "answer_tokens": result.answer_tokens,
        "parameters": result.parameters,
        "steps": history.step,
        "trained_tokens": history.tokens,
        "seconds": history.seconds,
        "first_loss": history.losses[0] if history.losses else None,
        "last_loss": history.losses[-1] if history.losses else None,
        "tokens_per_step_untrained": before.tokens_per_step,
        "tokens_per_step": after.tokens_per_step,
        "acceptance_by_position": after.by_position,
        "files": result.files,
    }


def _print(result: Trained) -> None:
    history = result.history
    before, after = history.measured[0], history.measured[-1]
    print(
        f"{history.step} steps, {history.tokens} tokens, {_clock(history.seconds)}; {held_out(after)}, "
        f"{before.tokens_per_step:.2f} before"
    )
    print(f"{result.options.out}: {', '.join(result.files)}")
