"""The GPU rig: a small model inflated to the cost of a 7.5B one, drafted for by its own low-bit copy.

    PYTHONPATH=src python3 benchmarks/rig.py --small DIR --prompts FOLDER [--out FILE.json] [--parts single,passes]

The pair is built on the device (rig_models.py), nothing large is read. Everything is measured in one run, side by side:
plain decoding, a draft with k = 1..8, n-grams, an EAGLE head, greedy and at temperature 0.7, one text and batches;
transformers' generate and assisted generation on the same weights; a long prompt; memory. Whether the greedy texts are
equal is checked for every prompt.

Prints a table; the last line on stdout is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from paceline.engines.local.generate import Progress, run
from paceline.engines.local.step import EngineParts
from rig_models import in_transformers, inflated, inflated_head, large_config, native, rounded, write_model
from safetensors.torch import load_file
from transformers import AutoConfig, AutoTokenizer

from paceline.bench.candidates import Subject
from paceline.bench.measure import Length
from paceline.bench.tune import TunePlan, tune
from paceline.core import AdaptiveDraftLength, FixedDraftLength, Row, SamplingParams, Sequence, StopRules
from paceline.core.draft_length import DraftLengthPolicy
from paceline.core.types import DraftInput
from paceline.drafting.draft_model import DraftModel
from paceline.drafting.eagle import Eagle
from paceline.drafting.ngram import Ngram
from paceline.drafting.no_draft import NoDraft
from paceline.engines.local.verifier import Verifier
from paceline.engines.local.warmup import measure_costs
from paceline.heads.shipped import shipped_head
from paceline.runners.native.runner import NativeRunner

COPY_BANDWIDTH = 4.3e12  # bytes a second this card copies at
SMALL = "SmolLM2-135M-Instruct"
BEGAN = time.perf_counter()


def say(*words: object) -> None:
    print(f"[{time.perf_counter() - BEGAN:6.1f} s]", *words, flush=True)


# --- measuring --------------------------------------------------------------------------------------------------------


@dataclass
class Line:
    """One row of the table."""

    name: str
    batch: int
    temperature: float
    tokens_per_second: float
    tokens_per_step: float
    round_ms: float
    tokens: int
    seconds: float
    places: float = 0.0  # texts in a round, on average: 23 texts do not keep 8 places busy to the end
    equal: str = ""  # greedy texts equal to plain ones
    texts: list[list[int]] = field(default_factory=list, repr=False)


def texts_for(prompts: list[list[int]], ends: frozenset[int], temperature: float, length: int) -> list[Sequence]:
    return [
        Sequence(prompt, SamplingParams(temperature=temperature, seed=number), StopRules(length, ends))
        for number, prompt in enumerate(prompts)
    ]


def measure(
    name: str, make: Callable[[], EngineParts], prompts: list[list[int]], temperature: float, batch: int, length: int
) -> Line:
    """Decode all prompts, prefill included. The same run goes before: captures and compilations happen there."""
    parts = make()
    ends = parts.target.info.eos_token_ids
    for _ in run(texts_for(prompts, ends, temperature, length), parts, max_num_seqs=batch):
        pass
    texts = texts_for(prompts, ends, temperature, length)
    torch.cuda.synchronize()
    started = time.perf_counter()
    rounds = passes_of(run(texts, parts, max_num_seqs=batch))
    torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    tokens = sum(text.new_tokens for text in texts)
    steps = sum(text.stats.steps for text in texts)
    accepted = sum(text.stats.accepted for text in texts)
    rate, tau = tokens / seconds, 1 + accepted / steps
    line = Line(name, batch, temperature, rate, tau, 1e3 * seconds / rounds, tokens, seconds, steps / rounds)
    line.texts = [text.written for text in texts]
    return line


def passes_of(rounds: Iterable[Progress]) -> int:
    """Let the texts be written, and count the passes of the target: a stride of plain rounds is as many."""
    count, longest = 0, 0
    seen: set[int] = set()
    for progress in rounds:
        if progress.text.number in seen:  # it is this text's turn again: a new round
            count, longest, seen = count + longest, 0, set()
        seen.add(progress.text.number)
        longest = max(longest, 1 if progress.round.tree.num_draft_tokens else len(progress.round.emitted))
    return count + longest


def replay_ms(work: Callable[[], Any], repeats: int = 20) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    taken = []
    for _ in range(repeats):
        begin.record()
        work()
        end.record()
        torch.cuda.synchronize()
        taken.append(begin.elapsed_time(end))
    return statistics.median(taken)


def pass_times(target: NativeRunner, widths: tuple[int, ...]) -> dict[int, float]:
    """Milliseconds of a captured pass of one text by width, at 300 tokens of context."""
    seq_cache = target.new_cache()
    target.forward([Row.chain(seq_cache, list(range(100, 400)))], last_only=True)
    found = {}
    assert target.decode_graphs is not None
    for width in widths:
        target.truncate(seq_cache, 300)
        target.forward([Row.chain(seq_cache, [5] * width)])
        size = target.decode_graphs.fits(1, width, 300 + width)
        assert size is not None
        found[width] = replay_ms(target.decode_graphs.forward_graph(size).run)
    target.free(seq_cache)
    return found


def loop_times(draft: NativeRunner, steps: tuple[int, ...], sampled: bool = False) -> dict[int, float]:
    seq_cache, found = draft.new_cache(), {}
    assert draft.decode_graphs is not None
    for k in steps:
        lead = DraftInput(seq_cache, list(range(100, 400)), 0.7 if sampled else 0.0, [0.5] * k if sampled else None)
        draft.draft([lead], k)
        size = draft.decode_graphs.fits(1, 2, 300 + k)
        assert size is not None
        found[k] = replay_ms(draft.decode_graphs.draft_graph(size, k, sampled).run)
    draft.free(seq_cache)
    return found


def prefill_ms(work: Callable[[], Any]) -> float:
    work()
    return replay_ms(work, 3)


# --- the run ----------------------------------------------------------------------------------------------------------


class Rig:
    """Everything measured in one process."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.lines: list[Line] = []
        self.facts: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
        small = AutoConfig.from_pretrained(args.small)
        state = {k: v.cuda() for f in sorted(Path(args.small).glob("*.safetensors")) for k, v in load_file(f).items()}
        self.tokenizer = AutoTokenizer.from_pretrained(args.small)
        self.config = large_config(small)
        self.large = inflated(state, small, self.config)
        self.small_state, self.small_config = rounded(state, 4), small
        before = torch.cuda.memory_allocated()
        self.target = native(self.large, self.config, "rig", args.kv_cache_tokens, batch_invariant=args.batch_invariant)
        self.facts["target_bytes"] = sum(linear.nbytes for linear in self.target.model.linears())
        self.facts["target_gib"] = (torch.cuda.memory_allocated() - before) / 2**30
        self.draft = native(self.small_state, small, "draft", args.kv_cache_tokens)
        self.loaded = torch.cuda.memory_allocated()
        self.prompts = self._prompts(Path(args.prompts))
        say(f"built: {self.facts['target_bytes'] / 1e9:.2f} GB a pass; {len(self.prompts)} prompts")

    def _prompts(self, folder: Path) -> list[list[int]]:
        """Every sixth development prompt, through the chat template: 23 of four kinds."""
        lines = [json.loads(line) for file in sorted(folder.glob("*.jsonl")) for line in file.read_text().splitlines()]
        chosen = lines[3::6][: self.args.count]
        made = []
        for one in chosen:
            messages = [{"role": "user", "content": one["prompt"]}]
            output = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
            made.append([int(token) for token in output["input_ids"]])
        return made

    def plain(self) -> EngineParts:
        return EngineParts(self.target, NoDraft(), FixedDraftLength(0), Verifier())

    def drafted(self, k: int) -> EngineParts:
        return EngineParts(self.target, DraftModel(self.draft, self.target.info.vocab_size), FixedDraftLength(k), Verifier())

    def ngram(self, k: int) -> EngineParts:
        return EngineParts(self.target, Ngram(), FixedDraftLength(k), Verifier())

    def add(self, line: Line, reference: Line | None = None) -> Line:
        if reference is not None:
            same = sum(a == b for a, b in zip(line.texts, reference.texts))
            line.equal = f"{same}/{len(line.texts)}"
        self.lines.append(line)
        say(
            f"{line.name:12} batch {line.batch:2} T {line.temperature:.1f}: {line.tokens_per_second:7.1f} tokens/s  "
            f"tau {line.tokens_per_step:.3f}  round {line.round_ms:.2f} ms  texts a round {line.places:.2f}  "
            f"equal {line.equal}"
        )
        return line

    def section(self, name: str, work: Callable[[], None]) -> None:
        """One part of the run; a failure is printed and the rest goes on."""
        try:
            work()
        except Exception:
            self.facts.setdefault("failed", []).append(name)
            say(f"FAILED {name}")
            traceback.print_exc()

    def single(self) -> None:
        length = self.args.length
        plain = self.add(measure("plain", self.plain, self.prompts, 0.0, 1, length))
        self.add(measure("draft k=5", lambda: self.drafted(5), self.prompts, 0.0, 1, length), plain)
        self.add(measure("ngram k=5", lambda: self.ngram(5), self.prompts, 0.0, 1, length), plain)

    def sampled(self) -> None:
        self.add(measure("plain", self.plain, self.prompts[::2], 0.7, 1, self.args.length))
        self.add(measure("ngram k=5", lambda: self.ngram(5), self.prompts[::2], 0.7, 1, self.args.length))
        self.add(measure("draft k=5", lambda: self.drafted(5), self.prompts[::2], 0.7, 1, self.args.length))

    def sweep(self) -> None:
        few = self.prompts[::3]
        for k in (1, 2, 3, 4, 5, 6, 7, 8):
            self.add(measure(f"draft k={k}", partial(self.drafted, k), few, 0.0, 1, self.args.length))

    def batches(self) -> None:
        length = self.args.length
        for batch in (8, 32):
            prompts = (self.prompts * 2)[: max(batch, len(self.prompts))]
            plain = self.add(measure("plain", self.plain, prompts, 0.0, batch, length))
            self.add(measure("draft k=5", lambda: self.drafted(5), prompts, 0.0, batch, length), plain)
            self.add(measure("ngram k=5", lambda: self.ngram(5), prompts, 0.0, batch, length), plain)
            self.add(measure("plain", self.plain, prompts, 0.7, batch, length))
            self.add(measure("draft k=5", lambda: self.drafted(5), prompts, 0.7, batch, length))

    def eagle(self, *, captured: bool = True) -> EngineParts:
        """The shipped EAGLE head; its chains captured whole, or launch by launch."""
        small = self.small_state["model.embed_tokens.weight"]
        drafter = Eagle(inflated_head(self.args.head, small, self.config.hidden_size), self.target)
        drafter.loop = drafter.loop if captured else None
        return EngineParts(self.target, drafter, FixedDraftLength(5), Verifier())

    def head(self) -> None:
        length = self.args.length
        self.add(measure("eagle k=5", self.eagle, self.prompts, 0.0, 1, length), self.greedy_plain(1))
        self.add(measure("eagle k=5", self.eagle, self.prompts[::3], 0.7, 1, length))
        self.add(measure("eagle k=5", self.eagle, self.prompts, 0.0, 8, length), self.greedy_plain(8))

    def greedy_plain(self, batch: int) -> Line | None:
        """The plain texts to compare with, if that part has run."""
        alike = (line for line in self.lines if line.name == "plain" and line.batch == batch)
        return next((line for line in alike if line.temperature == 0), None)

    def launches(self) -> None:
        """What capturing chains brings, on two prompts."""
        for captured in (True, False):
            name = "eagle, graph" if captured else "eagle, steps"
            self.add(measure(name, partial(self.eagle, captured=captured), self.prompts[:6:3], 0.0, 1, 128))

    def passes(self) -> None:
        widths = pass_times(self.target, (1, 6, 16))
        loops, drawn = loop_times(self.draft, (1, 5)), loop_times(self.draft, (5,), sampled=True)
        self.facts["pass_ms"] = widths
        self.facts["width_16_over_1"] = widths[16] / widths[1]
        self.facts["bandwidth_share"] = self.facts["target_bytes"] / (widths[1] / 1e3) / COPY_BANDWIDTH
        self.facts["loop_ms"], self.facts["loop_sampled_ms"] = loops, drawn
        self.facts["draft_step_ms"] = loops[5] / 5
        for line in self.lines:
            if line.batch == 1 and line.temperature == 0 and line.name in ("plain", "draft k=5"):
                busy = widths[1] if line.name == "plain" else widths[6] + loops[5]
                self.facts[f"host_ms {line.name}"] = self.round_wall(line.name) - busy
        say({name: value for name, value in self.facts.items() if "ms" in name or "share" in name or "over" in name})

    def memory(self) -> None:
        """What the runs so far took beyond weights and pages: graphs, activations, the allocator's and the driver's."""
        free, total = torch.cuda.mem_get_info()
        self.facts["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        self.facts["extra_gib"] = (torch.cuda.max_memory_reserved() - self.loaded) / 2**30
        self.facts["extra_with_driver_gib"] = (total - free - self.loaded) / 2**30
        say({name: value for name, value in self.facts.items() if name.endswith("gib")})

    def round_wall(self, name: str) -> float:
        """Median milliseconds of a round in the middle of a text, prefill not included."""
        parts = self.plain() if name == "plain" else self.drafted(5)
        text = texts_for([self.prompts[0]], frozenset(), 0.0, 256)[0]
        taken, before = [], time.perf_counter()
        for progress in run([text], parts):
            now = time.perf_counter()
            passes = 1 if name != "plain" else len(progress.round.emitted)
            taken.append(1e3 * (now - before) / passes)
            before = now
        return statistics.median(taken[5:])

    def long_prompt(self) -> None:
        ids = torch.randint(100, 40000, (4096,))
        seq_cache = self.target.new_cache()

        def ours() -> None:
            self.target.truncate(seq_cache, 0)
            self.target.forward([Row.chain(seq_cache, ids)], last_only=True)

        self.facts["prefill_4096_ms"] = prefill_ms(ours)
        self.target.free(seq_cache)
        model = in_transformers(self.large, self.config)
        batch = ids[None].cuda()
        with torch.inference_mode():
            self.facts["prefill_4096_ms_hf"] = prefill_ms(lambda: model(batch, logits_to_keep=1, use_cache=True))
        say("prefill of 4096 tokens, ms; ours, theirs:", [v for k, v in self.facts.items() if k.startswith("prefill")])

    def peers(self) -> None:
        target = in_transformers(self.large, self.config)
        draft = in_transformers(self.small_state, self.small_config)
        for name, extra in (("hf generate", {}), ("hf assistant", {"assistant_model": draft})):
            tokens, started = 0, time.perf_counter()
            for number, prompt in enumerate(self.prompts[:3]):
                if number == 1:  # the first one warms up
                    tokens, started = 0, time.perf_counter()
                ids = torch.tensor([prompt], device="cuda")
                if extra:
                    draft.generation_config.num_assistant_tokens = 5
                settings = {"max_new_tokens": 96 if number else 8, "do_sample": False, "pad_token_id": 2} | extra
                output = target.generate(ids, attention_mask=torch.ones_like(ids), **settings)
                tokens += output.shape[1] - ids.shape[1]
            torch.cuda.synchronize()
            seconds = time.perf_counter() - started
            self.add(Line(name, 1, 0.0, tokens / seconds, 0.0, 0.0, tokens, seconds))

    def auto(self) -> None:
        """The never-lose budget with the same pair."""
        costs = measure_costs(self.target, self.draft)
        drafter = DraftModel(self.draft, self.target.info.vocab_size)
        made = EngineParts(self.target, drafter, AdaptiveDraftLength(costs), Verifier())
        self.add(measure("draft k=auto", lambda: made, self.prompts[::3], 0.0, 1, self.args.length))

    def save(self, folder: Path) -> None:
        """The pair as a user would have it: FOLDER/target and FOLDER/draft."""
        write_model(folder / "target", self.large, self.config, self.tokenizer)
        write_model(folder / "draft", self.small_state, self.small_config, self.tokenizer)
        say(f"saved the pair in {folder}")

    def tune(self) -> None:
        """What `paceline tune` would advise here, predicted and measured."""
        drafters = {"none": NoDraft(), "draft": self.drafted(1).drafter, "ngram": Ngram()}

        def budget(method: str, k: int | str) -> DraftLengthPolicy:
            if isinstance(k, int):
                return FixedDraftLength(k)
            return AdaptiveDraftLength(measure_costs(self.target, self.draft if method == "draft" else None))

        subject = Subject(self.target, None, drafters, make_draft_length=budget)
        found = tune(subject, TunePlan(self.prompts[::4], Length(128)))
        self.facts["tune"] = [asdict(one) for one in found.confirmed]
        for one in found.confirmed:
            say(f"tune: {one.method} k={one.num_draft_tokens} predicted {one.predicted} measured {one.measured:.3f}")
        say(found.advice.sentence)

    def all(self) -> None:
        if self.args.save:
            self.section("save", lambda: self.save(Path(self.args.save)))
        parts: dict[str, Callable[[], None]] = {
            "single": self.single,
            "passes": self.passes,
            "sampled": self.sampled,
            "batches": self.batches,
            "memory": self.memory,
            "tune": self.tune,
            "prompt": self.long_prompt,
            "peers": self.peers,
            "sweep": self.sweep,
            "auto": self.auto,
            "head": self.head,  # last: a target that hands out its states has a little more to do
            "launches": self.launches,
        }
        wanted = self.args.parts.split(",") if self.args.parts else list(parts)
        for name in wanted:
            self.section(name, parts[name])
        self.report()

    def report(self) -> None:
        print("\n| system | batch | T | tokens/s | tau | ms a round | equal to plain |\n|---|---|---|---|---|---|---|")
        for line in self.lines:
            print(
                f"| {line.name} | {line.batch} | {line.temperature} | {line.tokens_per_second:.1f} | "
                f"{line.tokens_per_step:.3f} | {line.round_ms:.2f} | {line.equal} |"
            )
        rows = [{name: value for name, value in asdict(line).items() if name != "texts"} for line in self.lines]
        text = json.dumps(self.facts | {"lines": rows})
        if self.args.out:
            Path(self.args.out).write_text(text + "\n")
        print(text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", required=True, help="directory of the small model")
    parser.add_argument("--prompts", required=True, help="folder of *.jsonl with a prompt a line")
    parser.add_argument("--head", default=shipped_head("eagle", SMALL), help="an EAGLE head of the small model")
    parser.add_argument("--out", help="write the record here too")
    parser.add_argument("--count", type=int, default=23)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--cache-tokens", type=int, default=65536)
    parser.add_argument("--same-bits", action="store_true", help="batches write what their texts are alone")
    parser.add_argument("--save", help="write the pair here, as directories that the command line takes")
    parser.add_argument("--parts", help="some of single, passes, sampled, batches, memory, tune, prompt, peers, …")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("the rig needs a CUDA device", file=sys.stderr)
        return 2
    Rig(args).all()
    return 0


if __name__ == "__main__":
    sys.exit(main())
