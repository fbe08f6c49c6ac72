"""Find wrong output of any OpenAI-compatible server: scenarios known to break engines that speculate or cache prefixes.

    paceline doctor http://localhost:8000                            everything, a few minutes
    paceline doctor http://localhost:8000 --quick                    the same with fewer prompts
    paceline doctor URL --against URL2                               compare with a second server, without speculation
    paceline doctor URL --scenarios prefix-cache,seeds --html report.html

Answers are compared with other answers of the same model, so a weak model is no fault. Each fault comes with curl
command lines that show it. What a server does not offer is "not shown", never "ok".

Exit status: 0 no fault, 1 a fault, 2 an error that the user can put right, 3 nothing was shown.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.errors import MissingExtra, OptionError

if TYPE_CHECKING:
    from paceline.doctor.result import DoctorReport, ScenarioResult

DEFAULT_KEY = "OPENAI_API_KEY"
ENGINES = ("vllm", "sglang", "llama.cpp")


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("url", metavar="URL", nargs="?", help="the server, such as http://localhost:8000")
    servers = parser.add_argument_group("servers")
    servers.add_argument("--against", metavar="URL", help="a second server with the same model, taken to be right")
    servers.add_argument("--model", metavar="NAME", help="default: the first that the server lists")
    servers.add_argument(
        "--api-key-env",
        metavar="NAME",
        default=DEFAULT_KEY,
        help=f"variable that holds the key; default: {DEFAULT_KEY}",
    )
    servers.add_argument(
        "--engine", choices=ENGINES, help="use what this engine offers beyond OpenAI's API; default: as the server says"
    )
    checks = parser.add_argument_group("checks")
    checks.add_argument("--scenarios", metavar="A,B", help="default: all; --list shows them")
    checks.add_argument("--list", action="store_true", help="list the scenarios and what each checks")
    effort = checks.add_mutually_exclusive_group()
    effort.add_argument("--quick", action="store_true", help="fewer and shorter prompts")
    effort.add_argument("--thorough", action="store_true", help="more and longer prompts; takes long")
    checks.add_argument("--seed", type=int, metavar="N", help="of the prompts; default: new ones each time")
    checks.add_argument(
        "--near-tie", type=float, metavar="D", help="difference of log-probabilities that rounding explains"
    )
    reports = parser.add_argument_group("reports")
    reports.add_argument("--json", type=Path, metavar="FILE")
    reports.add_argument("--junit", type=Path, metavar="FILE", help="for CI")
    reports.add_argument("--html", type=Path, metavar="FILE", help="one page that needs nothing else")


def main(args: argparse.Namespace) -> int:
    try:
        import httpx  # noqa: F401
    except ImportError as error:
        raise MissingExtra("httpx", "doctor") from error
    if args.list:
        return _list()
    _check(args)
    report = _examined(args)
    _write(args, report)
    return report.exit_status


def _check(args: argparse.Namespace) -> None:
    """Raise OptionError before the server is asked anything."""
    if args.url is None:
        raise OptionError("name a server: paceline doctor http://localhost:8000")
    if args.near_tie is not None and not args.near_tie >= 0:
        raise OptionError(f"--near-tie is a number from 0 on, not {args.near_tie:g}")
    for path in (args.json, args.junit, args.html):
        if path is not None and not path.absolute().parent.is_dir():
            raise OptionError(f"there is no directory {path.absolute().parent} to write {path.name} into")


def _list() -> int:
    from paceline.doctor.scenario import all_scenarios

    for scenario in all_scenarios().values():
        print(f"{scenario.name:15}{scenario.purpose}")
    return 0


def _examined(args: argparse.Namespace) -> DoctorReport:
    from paceline.doctor.effort import EFFORTS
    from paceline.doctor.run import DoctorPlan, examine
    from paceline.doctor.scenario import chosen_scenarios
    from paceline.doctor.server import ServerOptions

    key = os.environ.get(args.api_key_env)
    options = ServerOptions(args.url, args.against, args.model, key, args.api_key_env, args.engine, args.near_tie)
    effort = EFFORTS["quick" if args.quick else "thorough" if args.thorough else "normal"]
    seed = time.time_ns() % 1_000_000_007 if args.seed is None else args.seed
    plan = DoctorPlan(chosen_scenarios(args.scenarios), effort, seed)
    return asyncio.run(examine(options, plan, _print))


def _print(result: ScenarioResult) -> None:
    from paceline.doctor.report import terminal_lines

    for line in terminal_lines(result):
        print(line, flush=True)


def _write(args: argparse.Namespace, report: DoctorReport) -> None:
    from paceline.doctor.html import html_page
    from paceline.doctor.report import junit, summary

    documents = {
        args.json: lambda: json.dumps(report.as_dict(), ensure_ascii=False, indent=1) + "\n",
        args.junit: lambda: junit(report),
        args.html: lambda: html_page(report),
    }
    for path, document in documents.items():
        if path is not None:
            path.write_text(document(), encoding="utf-8")
    print(summary(report))
