"""`paceline check --head`: every reading of a trained head on text of its target."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.cli import loading
from paceline.cli.terminal import note, quiet_transformers
from paceline.errors import OptionError

if TYPE_CHECKING:
    from paceline.heads.checkpoint import Checkpoint
    from paceline.lint.endpoint import ServerComparison
    from paceline.lint.report import TemplateNote
    from paceline.lint.run import LintResult
    from paceline.lint.session import LintText
    from paceline.train.task import TrainingTarget

DEVICES = ("cuda", "cpu")
ANOTHER_READING = 2  # exit status


def check_head(args: argparse.Namespace) -> int:
    """Print the readings and the result; returns the exit status."""
    from paceline.heads.checkpoint import read_checkpoint
    from paceline.lint.files import check_empty, head_folder
    from paceline.lint.registry import kind_of
    from paceline.lint.session import TextOptions

    quiet_transformers()
    if args.url and args.text:
        raise OptionError("--url compares answers to the same prompts: leave out --text")
    options = TextOptions(args.tokens, args.text, args.seed)
    checkpoint = read_checkpoint(head_folder(args.head, args.model))
    kind_of(checkpoint)  # a head without readings is refused before the target writes anything
    if args.fix:
        check_empty(Path(args.fix))
    loading.begin(args.model)
    report = _Report(args, checkpoint, options)
    return report.run()


class _Report:
    """What is printed for one head, in its order."""

    def __init__(self, args: argparse.Namespace, checkpoint: Checkpoint, options: Any) -> None:
        self._args, self._checkpoint, self._options = args, checkpoint, options

    def run(self) -> int:
        from paceline.build import build_engine
        from paceline.device.properties import chosen_device
        from paceline.lint.session import lint_text, open_target, template_note

        target = open_target(self._args.model, chosen_device(self._args.device, DEVICES))
        loading.done()
        text = lint_text(target, build_engine, self._options, note)
        result = self._lint(target, text)
        template = template_note(target, result.files, text)
        server = self._server(text, result) if self._args.url else None
        self._finish(result, template, server)
        return 0 if result.correct and not (server and server.lower) else ANOTHER_READING

    def _server(self, text: LintText, result: LintResult) -> ServerComparison:
        from paceline.build import open_engine
        from paceline.lint.endpoint import compare_server

        note(f"{self._args.url} answers the same prompts")
        return compare_server(self._args.url, self._args.model, text.answers, text.stated, result, open_engine)

    def _lint(self, target: TrainingTarget, text: LintText) -> LintResult:
        from paceline.lint.report import table_head, table_line
        from paceline.lint.run import POSITIONS, lint
        from paceline.lint.target import TargetFacts

        self._print(f"head     {self._checkpoint.folder}")
        self._print(f"text     {text.stated.answer_tokens} tokens, {text.origin}")
        self._print(table_head(POSITIONS))
        facts = TargetFacts.of(target)
        return lint(self._checkpoint, text.stated, facts, lambda tried: self._print(table_line(tried)))

    def _finish(self, result: LintResult, template: TemplateNote | None, server: ServerComparison | None) -> None:
        from paceline.lint.files import write_copy
        from paceline.lint.report import document, result_lines

        for line in [*result_lines(result, template), *([server.line()] if server else [])]:
            self._print(line)
        fixed = self._args.fix if self._args.fix and not result.correct else None
        if fixed:
            write_copy(self._checkpoint, result.files, Path(fixed))
        if self._args.json:
            about = {"head": str(self._checkpoint.folder), "fixed": fixed, "server": server and server.as_dict()}
            print(json.dumps({**about, **document(result, template)}))
        elif not result.correct:
            self._print(f"fix      {'written to ' + fixed if fixed else 'add --fix OUT to write a corrected copy'}")

    def _print(self, line: str) -> None:
        if not self._args.json:
            print(line, flush=True)
