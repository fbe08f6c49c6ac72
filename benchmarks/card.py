"""All that is measured on a card through the user's door, in one run that can be cut off and gone on with.

    python benchmarks/card.py --write-rig SMALL FOLDER [--head FOLDER]     the rig: target, draft, a block head
    python benchmarks/card.py --write-rig SMALL FOLDER --shape small       one with the sizes of the Qwen pair
    python benchmarks/card.py --pair TARGET DRAFT --rig FOLDER --gguf TARGET.gguf DRAFT.gguf \\
        --prompts code.jsonl chat.jsonl --limit-prompts 6 --seconds 560 --out card.json

Every row is a fresh process of benchmarks/fresh.py that meets its prompts for the first time. Rows come in the order of
SECTIONS, those that decide most first; none begins that would hardly end within --seconds, and a row that is in --out
already is not measured again. With --python vllm=PATH rows of vLLM stand beside ours, same models, same flags.
--only "rig; rig, int4: plain, draft:auto" measures a whole section and two rows of another; a row that the section does
not have is added to it. Prints one table a section, with the rows of it that were measured before.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a program, it knows only its own folder
from benchmarks import fresh
from benchmarks.fresh_process import PLAIN, FreshResult, Job, Pass, in_fresh_process

USUAL_SECONDS = 45.0  # of a row, before one was measured
BATCHES = 3  # prompts of a row are so many batches at least: while the last few texts end, a batch is not full
RIG_TARGET, RIG_DRAFT, RIG_HEAD = "target", "draft", "dflash"


@dataclass(frozen=True, slots=True)
class Section:
    """Rows over one target.

    models  the flag that names the target and its draft
    draft   instead of that draft, another part of the same folder
    """

    name: str
    models: str
    rows: str
    batch: int = 1
    dtype: str | None = "bf16"
    draft: str | None = None


SECTIONS = (
    Section("pair", "pair", "plain,draft:3,draft:auto,draft:5,auto"),
    Section("rig", "rig", "plain,draft:5,draft:auto,draft:7"),
    Section("pair, vLLM", "pair", "vllm/plain,vllm/draft:3"),
    Section("pair, 8 at a time", "pair", "plain,draft:3", batch=8),
    Section("rig, block head", "rig", "plain,dflash:7,dflash:15,dflash:auto", draft=RIG_HEAD),
    Section("rig, int4", "rig", "plain,draft:5,draft:auto", dtype="int4"),
    Section("pair, GGUF", "gguf", "plain,draft:3", dtype=None),
    Section("rig, fp8", "rig", "plain,draft:5", dtype="fp8"),
    Section("rig, block head, 8 at a time", "rig", "plain,dflash:7,dflash:auto", batch=8, draft=RIG_HEAD),
    Section("pair, further", "pair", "plain,ngram:5,draft:7"),
    Section("rig, further", "rig", "plain,ngram:5,auto"),
    Section("pair, 8 at a time, further", "pair", "plain,draft:auto,draft:5", batch=8),
    Section("pair, vLLM, 8 at a time", "pair", "vllm/plain,vllm/draft:3", batch=8),
)


def chosen_sections(only: str) -> Iterator[tuple[Section, set[str]]]:
    """Sections to show, each with the rows to measure. only: `NAME; NAME: ROW, ROW`; empty: all."""
    named = {name.strip(): rows for name, _, rows in (part.partition(":") for part in only.split(";")) if name.strip()}
    if unknown := named.keys() - {section.name for section in SECTIONS}:
        sys.exit(f"card.py: no section is called {' or '.join(sorted(unknown))}")
    for section in SECTIONS:
        if not named or section.name in named:
            own = section.rows.split(",")
            rows = [row.strip() for row in named.get(section.name, "").split(",") if row.strip()]
            further = [row for row in rows if row not in own]
            yield replace(section, rows=",".join(own + further)), set(rows or own)


def models_of(section: Section, args: argparse.Namespace) -> tuple[str, str] | None:
    """Target and draft; None: not named."""
    if section.models == "rig":
        folder = args.rig and Path(args.rig)
        return (str(folder / RIG_TARGET), str(folder / (section.draft or RIG_DRAFT))) if folder else None
    named = getattr(args, section.models)
    return tuple(named) if named else None


def prompts_of(section: Section, args: argparse.Namespace) -> list[str]:
    """Of a batch more than --limit-prompts says, where there are more."""
    few = fresh.read_prompts(args)
    if section.batch == 1 or len(few) >= BATCHES * section.batch:
        return few
    limit = -(-BATCHES * section.batch // len(args.prompts))
    return fresh.read_prompts(argparse.Namespace(**(vars(args) | {"limit_prompts": limit})))


def jobs_of(section: Section, args: argparse.Namespace, prompts: list[str]) -> Iterator[Job]:
    """As fresh.py would make them from its own flags."""
    models = models_of(section, args)
    if models is None:
        return
    flags = ["--model", models[0], "--draft", models[1], "--rows", section.rows, "--plain-once"]
    flags += ["--max-new-tokens", str(args.max_new_tokens), "--row-seconds", str(args.row_seconds)]
    flags += ["--device", args.device, *(["--dtype", section.dtype] if section.dtype else [])]
    for interpreter in args.python:
        flags += ["--python", interpreter]
    row_args = fresh.parse(flags)
    for name in section.rows.split(","):
        if name == PLAIN:
            yield fresh.plain_job(row_args, prompts, section.batch)
        elif fresh.can_run(name, row_args):
            yield fresh.engine_job(name, row_args, fresh.base_options(row_args, prompts, section.batch))


class Records:
    """What was measured so far, on disk after every row."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._rows: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}

    def get(self, section: Section, job: Job) -> FreshResult | None:
        row = self._rows.get(_key(section, job))
        if row is None:
            return None
        return FreshResult(job, **(row | {"first": Pass(**row["first"]), "warm": Pass(**row["warm"])}))

    def put(self, section: Section, result: FreshResult) -> None:
        row = asdict(result)
        del row["job"]
        self._rows[_key(section, result.job)] = row
        self.path.write_text(json.dumps(self._rows))


def _key(section: Section, job: Job) -> str:
    """Rows of the same models and settings are measured once, whatever sections they are in."""
    draft = section.draft if job.draft else None
    return "/".join(str(part) for part in (section.models, section.dtype, section.batch, draft, job.name))


@dataclass(slots=True)
class Clock:
    """Seconds that are left; `usual` is what a row has taken lately."""

    end: float
    usual: float = USUAL_SECONDS

    def allows_another(self) -> bool:
        return time.monotonic() + self.usual < self.end


def run_section(
    section: Section, jobs: list[Job], wanted: set[str], records: Records, clock: Clock
) -> list[fresh.ComparedRow]:
    """Rows that are measured, now if they are wanted or before, each beside the section's plain row, or an engine's."""
    rows: list[fresh.ComparedRow] = []
    for job in jobs:
        result = records.get(section, job)
        if result is None and job.name in wanted and clock.allows_another():
            began = time.monotonic()
            result = in_fresh_process(job)
            clock.usual = time.monotonic() - began
            records.put(section, result)
        if result is not None:
            plain = rows[0].result if rows and rows[0].result.job.name.endswith(PLAIN) else result
            rows.append(fresh.ComparedRow(result, plain))
    return rows


def write_rig(small: str, folder: Path, head: str | None, device: str, *, dry_run: bool, shape: str) -> None:
    """The rig as directories that the command line takes."""
    from benchmarks import rig_models
    from paceline.heads.registry import save_head

    pair = rig_models.build_pair(small, device, dry_run=dry_run, shape=shape)
    rig_models.write_model(folder / RIG_TARGET, pair.large, pair.large_config, pair.tokenizer)
    rig_models.write_model(folder / RIG_DRAFT, pair.small, pair.small_config, pair.tokenizer)
    if head is not None:
        embedding = pair.small["model.embed_tokens.weight"]
        wide = rig_models.inflated_block_head(head, embedding, pair.large_config.hidden_size, device)
        save_head(wide, folder / RIG_HEAD)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write-rig", nargs=2, metavar=("SMALL", "FOLDER"))
    parser.add_argument("--head", metavar="FOLDER", help="a DFlash head of the small model, for --write-rig")
    parser.add_argument("--shape", choices=("large", "small"), default="large", help="of the rig: a 7.5B, or a 1.5B")
    parser.add_argument("--dry-run", action="store_true", help="a rig of twice the small model's sizes")
    parser.add_argument("--pair", nargs=2, metavar=("TARGET", "DRAFT"))
    parser.add_argument("--gguf", nargs=2, metavar=("TARGET", "DRAFT"))
    parser.add_argument("--rig", metavar="FOLDER")
    parser.add_argument("--only", default="", metavar="NAME[: ROW,…];…", help="of the sections")
    parser.add_argument("--prompts", nargs="+", default=["builtin:code,chat"], metavar="FILE")
    parser.add_argument("--limit-prompts", type=int, metavar="N", help="of each file")
    parser.add_argument("--max-new-tokens", type=int, default=256, metavar="N")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--python", action="append", default=[], metavar="ENGINE=PATH")
    parser.add_argument("--row-seconds", type=float, default=180.0, metavar="S", help="one row, at most")
    parser.add_argument("--seconds", type=float, default=560.0, metavar="S", help="of all rows")
    parser.add_argument("--out", default="card.json", metavar="FILE")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    if args.write_rig:
        small, folder = args.write_rig
        write_rig(small, Path(folder), args.head, args.device, dry_run=args.dry_run, shape=args.shape)
    clock, records = Clock(time.monotonic() + args.seconds), Records(Path(args.out))
    for section, wanted in chosen_sections(args.only):
        prompts = prompts_of(section, args)
        rows = run_section(section, list(jobs_of(section, args, prompts)), wanted, records, clock)
        if rows:
            print(f"\n{section.name}: {len(prompts)} prompts, up to {args.max_new_tokens} new tokens, greedy")
            print(fresh.table(rows), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
