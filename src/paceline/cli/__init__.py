"""paceline runs language models faster with speculative decoding, and the output is provably unchanged.

    paceline demo                                   see it work
    paceline generate --chat "Explain attention."   generate from a prompt
    paceline serve MODEL --draft-model SMALL        an OpenAI-compatible server
    paceline COMMAND --help                         what a command does and takes

Exit status: 0 success, 2 an error that the user can put right (the message says how), 130 interrupted.
"""

# A command is a module of this package with `configure(parser)` and `main(args)`. It is imported when it is called, so
# that help is quick and no command pays for another's imports.

from __future__ import annotations

import argparse
import difflib
import importlib
import importlib.util
import sys

from paceline.cli import interrupt
from paceline.cli.interrupt import INTERRUPTED
from paceline.cli.terminal import drop_unwritable_output, prepare_streams
from paceline.config import DEFAULT_MODEL
from paceline.errors import OptionError, PacelineError
from paceline.tuned import LOCAL

COMMANDS = {
    "demo": "one prompt with and without speculation, and the figures",
    "generate": "generate from a prompt, a file or standard input",
    "chat": "chat with a model over several turns",
    "serve": "an OpenAI-compatible server",
    "bench": "measure methods against each other on real prompts",
    "tune": "find the fastest method and number of draft tokens on this machine",
    "train": "train a draft model or a head for a target",
    "audit": "test that the output is unchanged, by statistics",
    "doctor": "find wrong output of any OpenAI-compatible server",
    "plan": "memory and predicted speed-up, before downloading anything",
    "pairs": "which draft models go with which targets",
    "check": "whether a draft model fits a target, or a head is loaded with its training settings",
    "fetch": "download and convert a model; prints its directory",
    "models": "what is in the cache: list, show, rm",
}
USER_ERROR, BROKEN_PIPE = 2, 141


def main(argv: list[str] | None = None) -> int:
    """Run one command. Returns the exit status, also where argparse exits by itself (--help, wrong usage).

    argv: None for the arguments of this process, which then belongs to the command: an interrupt ends it.
    """
    try:
        if argv is None:
            interrupt.watch()
            prepare_streams()
        status = _run(sys.argv[1:] if argv is None else argv)
        sys.stdout.flush()  # a closed pipe must raise here, not at exit
        return status
    except PacelineError as error:
        if argv is None and interrupt.pressed():  # what was cut off is reported as damaged
            interrupt.leave(INTERRUPTED)
        print(f"paceline: error: {error}", file=sys.stderr)
        return USER_ERROR
    except KeyboardInterrupt:
        print(file=sys.stderr)
        if argv is None:
            interrupt.leave(INTERRUPTED)
        return INTERRUPTED
    except BrokenPipeError:
        drop_unwritable_output()
        return BROKEN_PIPE
    except OSError as error:  # a full disk, a folder that cannot be written
        drop_unwritable_output()
        print(f"paceline: error: {error}", file=sys.stderr)
        return USER_ERROR
    except SystemExit as stop:
        if isinstance(stop.__context__, BrokenPipeError):  # rich exits with 1
            return BROKEN_PIPE
        return stop.code if isinstance(stop.code, int) else 0
    except Exception:  # what an interrupt has cut in two raises anything
        if argv is None and interrupt.pressed():
            interrupt.leave(INTERRUPTED)
        raise
    finally:
        if argv is not None:
            from paceline.cli import loading

            loading.ended()


def commands() -> list[str]:
    """The commands that are installed."""
    return [name for name in COMMANDS if importlib.util.find_spec(f"{__name__}.{name}")]


def _run(argv: list[str]) -> int:
    if argv[:1] == ["help"] and len(argv) == 2:
        argv = [argv[1], "--help"]
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(_help())
        return 0
    if argv[0] in ("-V", "--version"):
        from paceline import __version__

        print(f"paceline {__version__}")
        return 0
    return _run_command(argv[0], argv[1:])


def _run_command(name: str, arguments: list[str]) -> int:
    if name not in commands():
        raise _unknown_command(name)
    from paceline.cli import loading
    from paceline.cli.flags import CommandParser

    module = importlib.import_module(f"{__name__}.{name}")
    parser = CommandParser(prog=f"paceline {name}", description=module.__doc__)
    module.configure(parser)
    args = parser.parse_args(arguments)
    if name in loading.COMMANDS:
        loading.begin(_loaded(args))
    try:
        status: int = module.main(args)
        return status
    finally:
        loading.done()


def _loaded(args: argparse.Namespace) -> str | None:
    """What a command loads; None where a running server has the model."""
    given = vars(args)
    if (engine := given.get("engine") or LOCAL) != LOCAL:
        from paceline.engines.registry import spec

        if spec(engine).remote:
            return None
    if given.get("config") is not None:
        return f"the models of {given['config']}"
    return str(given.get("model", DEFAULT_MODEL))


def _unknown_command(name: str) -> OptionError:
    near = difflib.get_close_matches(name, [*commands(), "--version", "--help"], n=1)
    hint = f"; did you mean {near[0]}?" if near else f"; the commands are {', '.join(commands())}"
    return OptionError(f"there is no command {name!r}{hint}")


def _help() -> str:
    lines = "\n".join(f"  {name:<10}{COMMANDS[name]}" for name in commands())
    return f"{(__doc__ or '').strip()}\n\nCommands:\n{lines}\n\n  --version   print the version"
