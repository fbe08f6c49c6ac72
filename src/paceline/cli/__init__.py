"""paceline: the same text from your language model, faster, provably unchanged.

    paceline demo                                   see it work
    paceline generate "Explain attention."          write a text
    paceline WORD --help                            what a word does and takes

Exit status: 0 done, 2 something the user can put right (the message says what), 130 interrupted.
"""

# A word is a module of this package with `configure(parser)` and `main(args)`. It is imported when it is said, so
# that help is quick and no word pays for another's imports.

from __future__ import annotations

import argparse
import difflib
import importlib
import importlib.util
import os
import sys

from paceline.errors import OptionError, PacelineError

WORDS = {
    "demo": "one prompt, plain and speculative, side by side with the figures",
    "generate": "write the continuation of a prompt, a file or standard input",
    "chat": "talk with a model, several turns",
    "check": "can this draft work for this target?",
    "fetch": "obtain and convert a model; prints its directory",
    "train": "train a draft or heads for a target",
    "bench": "measure methods against each other on real prompts",
    "audit": "prove statistically that the output is unchanged",
    "tune": "find the method and k that pay on this machine",
    "plan": "memory and predicted speed-up, before downloading anything",
    "pairs": "which small model goes with which large one",
    "serve": "an OpenAI-compatible server",
}
USER_ERROR, INTERRUPTED, BROKEN_PIPE = 2, 130, 141


def main(argv: list[str] | None = None) -> int:
    """Say one word. Returns the exit status; argparse's own exits (--help, bad usage) are turned into one too."""
    try:
        status = _say(sys.argv[1:] if argv is None else argv)
        sys.stdout.flush()  # a reader that has left must show here, not at exit
        return status
    except PacelineError as error:
        print(f"paceline: error: {error}", file=sys.stderr)
        return USER_ERROR
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader has left. Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 0


def words() -> list[str]:
    """The words that are installed."""
    return [word for word in WORDS if importlib.util.find_spec(f"{__name__}.{word}")]


def _say(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(_help())
        return 0
    if argv[0] in ("-V", "--version"):
        from paceline import __version__

        print(f"paceline {__version__}")
        return 0
    word, rest = argv[0], argv[1:]
    if word not in words():
        near = difflib.get_close_matches(word, words(), n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise OptionError(f"there is no word {word!r}{hint} The words are: {', '.join(words())}")
    module = importlib.import_module(f"{__name__}.{word}")
    parser = argparse.ArgumentParser(
        prog=f"paceline {word}", description=module.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    module.configure(parser)
    status: int = module.main(parser.parse_args(rest))
    return status


def _help() -> str:
    listed = "\n".join(f"  {word:<10}{WORDS[word]}" for word in words())
    return f"{(__doc__ or '').strip()}\n\nWords:\n{listed}\n\n  --version   print the version"
