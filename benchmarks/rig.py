"""The GPU rig: a small model inflated to the cost of a 7.5B one, drafted for by its own low-bit copy.

    PYTHONPATH=src python3 benchmarks/rig.py --small DIR --prompts FOLDER [--out FILE.json] [--parts single,passes]
    PYTHONPATH=src python3 benchmarks/rig.py --small DIR --prompts FOLDER --dry-run       also without a GPU, in seconds

The pair is built on the device (rig_models.py), nothing large is read. Everything is measured in one run, side by side:
plain decoding, a draft model with k = 1..8, n-grams, an EAGLE head, greedy and at temperature 0.7, one sequence and
batches; transformers' generate and assisted generation on the same weights; a long prompt; memory. Greedy outputs are
compared with plain decoding for every prompt. Engines have no prefix cache.

Prints a table; the last line on stdout is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from rig_models import build_pair, in_transformers, inflated_head, pass_bytes, read_prompts, write_model
from rig_timing import allocated, draft_times, pass_times, prefill_ms

from paceline.bench.candidates import Candidate, Candidates, DecodeSetting, open_candidates
from paceline.bench.measure import OutputLength
from paceline.bench.tune import TunePlan, tune
from paceline.build import OpenModel, build_engine, open_model, open_runner
from paceline.config import AUTO, NONE, EngineConfig
from paceline.core.protocols import Runner
from paceline.core.sampling import SamplingParams
from paceline.core.stats import SpecStats
from paceline.core.types import Request, Row
from paceline.drafting.draft_model import DraftModel
from paceline.drafting.eagle import Eagle
from paceline.engines.local.engine import LocalEngine
from paceline.engines.local.request_state import RequestState
from paceline.engines.local.warmup import synchronize
from paceline.heads.shipped import shipped_head

COPY_BANDWIDTH = 4.3e12  # bytes a second that this GPU copies at
SMALL = "SmolLM2-135M-Instruct"
DRAFT_MODEL, NGRAM, EAGLE = "draft_model", "ngram", "eagle"
NAMES = {NONE: "plain", DRAFT_MODEL: "draft"}  # of methods in the table, where they differ
BEGAN = time.perf_counter()


def log(*parts: object) -> None:
    print(f"[{time.perf_counter() - BEGAN:6.1f} s]", *parts, flush=True)


# --- measuring --------------------------------------------------------------------------------------------------------


@dataclass
class Line:
    """One row of the table.

    seqs_per_step  on average: 23 sequences do not keep a batch of 8 full to the end
    equal          greedy outputs equal to those of plain decoding
    """

    name: str
    batch: int
    temperature: float
    tokens_per_second: float
    tokens_per_step: float
    step_ms: float
    tokens: int
    seconds: float
    seqs_per_step: float = 0.0
    equal: str = ""
    outputs: list[list[int]] = field(default_factory=list, repr=False)


def requests_for(prompts: list[list[int]], temperature: float, length: int, ignore_eos: bool = False) -> list[Request]:
    return [
        Request(prompt, SamplingParams(temperature=temperature, seed=index), length, ignore_eos=ignore_eos)
        for index, prompt in enumerate(prompts)
    ]


def measure(name: str, engine: LocalEngine, prompts: list[list[int]], temperature: float, length: int) -> Line:
    """Decode all prompts, prefill included. The same run goes before: it captures graphs and compiles kernels."""
    engine.run(requests_for(prompts, temperature, length))
    states = [engine.add(request) for request in requests_for(prompts, temperature, length)]
    synchronize(engine.info.device)
    started, passes = time.perf_counter(), 0
    while engine.has_work:
        passes += step(engine, states)
    synchronize(engine.info.device)
    seconds = time.perf_counter() - started
    stats = SpecStats()
    for state in states:
        if state.error is not None:
            raise state.error
        stats.add(state.seq.stats)
    line = Line(
        name,
        engine.config.max_num_seqs,
        temperature,
        stats.new_tokens / seconds,
        stats.tokens_per_step,
        1e3 * seconds / passes,
        stats.new_tokens,
        seconds,
        stats.steps / passes,
    )
    line.outputs = [state.seq.generated for state in states]
    return line


def step(engine: LocalEngine, states: list[RequestState]) -> int:
    """One step of the engine; returns the passes of the target in it: several plain steps in a row are as many."""
    before = [state.seq.stats.steps for state in states]
    engine.step()
    return max(state.seq.stats.steps - steps for state, steps in zip(states, before))


# --- the run ----------------------------------------------------------------------------------------------------------


class Rig:
    """Everything measured in one process."""

    def __init__(self, args: argparse.Namespace, device: str) -> None:
        self.args, self.device = args, device
        self.lines: list[Line] = []
        name = torch.cuda.get_device_name() if device.startswith("cuda") else device
        self.facts: dict[str, Any] = {"device": name, "torch": torch.__version__}
        self.pair = pair = build_pair(args.small, device, dry_run=args.dry_run)
        config = self._config()
        before = allocated(device)
        opened = open_model(config)
        self.target = opened.target
        self.facts["target_bytes"] = pass_bytes(pair.large)
        self.facts["target_gib"] = (allocated(device) - before) / 2**30
        self.draft = self._open_draft(config)
        self.loaded = allocated(device)
        self.candidates = self._candidates(config, opened)
        self.prompts = read_prompts(Path(args.prompts), pair.tokenizer, args.count)
        log(f"built: {self.facts['target_bytes'] / 1e9:.2f} GB a pass; {len(self.prompts)} prompts")

    def _config(self) -> EngineConfig:
        return EngineConfig.create(
            in_transformers(self.pair.large, self.pair.large_config, self.device),
            tokenizer=self.pair.tokenizer,
            device=self.device,
            runner="native",
            kv_cache_tokens=self.args.kv_cache_tokens,
            batch_invariant=self.args.batch_invariant,
            prefix_cache_tokens=0,
        )

    def _open_draft(self, config: EngineConfig) -> Runner:
        model = in_transformers(self.pair.small, self.pair.small_config, self.device)
        draft_config = replace(config.model, model=model, batch_invariant=False)
        return open_runner(draft_config, self.device, self.args.kv_cache_tokens)

    def _candidates(self, config: EngineConfig, opened: OpenModel) -> Candidates:
        drafter = DraftModel(self.draft, self.target.info.vocab_size)
        configs = {
            NONE: config.with_options(method=NONE),
            DRAFT_MODEL: config.with_options(method=DRAFT_MODEL, drafter=drafter),
            NGRAM: config.with_options(method=NGRAM),
        }
        return open_candidates(
            self.target,
            opened.tokenizer,
            configs,
            lambda config, target: build_engine(config, replace(opened, target=target)),
        )

    def engine(self, method: str, k: int | str, batch: int = 1) -> LocalEngine:
        return self.candidates.engine(DecodeSetting(method, k), batch)

    def run(
        self,
        method: str,
        k: int | str,
        prompts: list[list[int]],
        temperature: float = 0.0,
        batch: int = 1,
        reference: Line | None = None,
    ) -> Line:
        """Measure one setting and add its line. reference: the plain line whose outputs it is compared with."""
        name = NAMES.get(method, method) + ("" if method == NONE else f" k={k}")
        return self.add(measure(name, self.engine(method, k, batch), prompts, temperature, self.args.length), reference)

    def add(self, line: Line, reference: Line | None = None) -> Line:
        if reference is not None:
            same = sum(output == plain for output, plain in zip(line.outputs, reference.outputs))
            line.equal = f"{same}/{len(line.outputs)}"
        self.lines.append(line)
        log(
            f"{line.name:12} batch {line.batch:2} T {line.temperature:.1f}: {line.tokens_per_second:7.1f} tokens/s  "
            f"tau {line.tokens_per_step:.3f}  step {line.step_ms:.2f} ms  sequences a step {line.seqs_per_step:.2f}  "
            f"equal {line.equal}"
        )
        return line

    def greedy_plain(self, batch: int) -> Line | None:
        """The plain outputs to compare with, if that part has run."""
        plain = (line for line in self.lines if line.name == "plain" and line.batch == batch)
        return next((line for line in plain if line.temperature == 0), None)

    def all(self) -> None:
        names = self.args.parts.split(",") if self.args.parts else list(PARTS)
        if self.args.save:
            self.section("save", save)
        for name in names:
            self.section(name, PARTS[name])
        self.report()

    def section(self, name: str, part: Callable[[Rig], None]) -> None:
        """One part of the run; a failure is printed and the rest goes on."""
        try:
            part(self)
        except Exception:
            self.facts.setdefault("failed", []).append(name)
            log(f"FAILED {name}")
            traceback.print_exc()

    def report(self) -> None:
        print("\n| system | batch | T | tokens/s | tau | ms a step | equal to plain |\n|---|---|---|---|---|---|---|")
        for line in self.lines:
            print(
                f"| {line.name} | {line.batch} | {line.temperature} | {line.tokens_per_second:.1f} | "
                f"{line.tokens_per_step:.3f} | {line.step_ms:.2f} | {line.equal} |"
            )
        rows = [{name: value for name, value in asdict(line).items() if name != "outputs"} for line in self.lines]
        document = json.dumps(self.facts | {"lines": rows})
        if self.args.out:
            Path(self.args.out).write_text(document + "\n")
        print(document)


# --- parts of the run -------------------------------------------------------------------------------------------------


def single(rig: Rig) -> None:
    plain = rig.run(NONE, 0, rig.prompts)
    rig.run(DRAFT_MODEL, 5, rig.prompts, reference=plain)
    rig.run(NGRAM, 5, rig.prompts, reference=plain)


def sampled(rig: Rig) -> None:
    for method, k in ((NONE, 0), (NGRAM, 5), (DRAFT_MODEL, 5)):
        rig.run(method, k, rig.prompts[::2], 0.7)


def sweep(rig: Rig) -> None:
    for k in range(1, 9):
        rig.run(DRAFT_MODEL, k, rig.prompts[::3])


def batches(rig: Rig) -> None:
    for batch in (8, 32):
        prompts = (rig.prompts * 2)[: max(batch, len(rig.prompts))]
        plain = rig.run(NONE, 0, prompts, 0.0, batch)
        rig.run(DRAFT_MODEL, 5, prompts, 0.0, batch, plain)
        rig.run(NGRAM, 5, prompts, 0.0, batch, plain)
        rig.run(NONE, 0, prompts, 0.7, batch)
        rig.run(DRAFT_MODEL, 5, prompts, 0.7, batch)


def auto(rig: Rig) -> None:
    """The adaptive draft length with the same pair."""
    rig.run(DRAFT_MODEL, AUTO, rig.prompts[::3])


def head(rig: Rig) -> None:
    _add_eagle(rig, captured=True)
    rig.run(EAGLE, 5, rig.prompts, reference=rig.greedy_plain(1))
    rig.run(EAGLE, 5, rig.prompts[::3], 0.7)
    rig.run(EAGLE, 5, rig.prompts, 0.0, 8, rig.greedy_plain(8))


def launches(rig: Rig) -> None:
    """What capturing chains gains, on two prompts."""
    for captured in (True, False):
        _add_eagle(rig, captured=captured)
        name = "eagle, graph" if captured else "eagle, eager"
        rig.add(measure(name, rig.engine(EAGLE, 5), rig.prompts[:6:3], 0.0, 128))


def _add_eagle(rig: Rig, *, captured: bool) -> None:
    """The shipped EAGLE head as a candidate; its chains captured as graphs, or launch by launch."""
    embedding = rig.pair.small["model.embed_tokens.weight"]
    head = inflated_head(rig.args.head, embedding, rig.pair.large_config.hidden_size, rig.device)
    drafter = Eagle(head, rig.target)
    drafter.graphs = drafter.graphs if captured else None
    config = rig.candidates.by_method[NONE].config.with_options(method=EAGLE, drafter=drafter)
    by_method = {**rig.candidates.by_method, EAGLE: Candidate(config, drafter)}
    rig.candidates = replace(rig.candidates, by_method=by_method)


def passes(rig: Rig) -> None:
    """Time of the graphs alone, without the host."""
    if not rig.device.startswith("cuda"):
        log("graphs are timed on a GPU only")
        return
    widths = pass_times(rig.target, (1, 6, 16))
    drafts, sampled = draft_times(rig.draft, (1, 5)), draft_times(rig.draft, (5,), 0.7)
    rig.facts["pass_ms"] = widths
    rig.facts["width_16_over_1"] = widths[16] / widths[1]
    rig.facts["bandwidth_share"] = rig.facts["target_bytes"] / (widths[1] / 1e3) / COPY_BANDWIDTH
    rig.facts["loop_ms"], rig.facts["loop_sampled_ms"] = drafts, sampled
    rig.facts["draft_step_ms"] = drafts[5] / 5
    for name, method, k, device_ms in (
        ("plain", NONE, 0, widths[1]),
        ("draft k=5", DRAFT_MODEL, 5, widths[6] + drafts[5]),
    ):
        if any(line.name == name and line.batch == 1 and line.temperature == 0 for line in rig.lines):
            rig.facts[f"host_ms {name}"] = step_wall_ms(rig, method, k) - device_ms
    log({name: value for name, value in rig.facts.items() if "ms" in name or "share" in name or "over" in name})


def step_wall_ms(rig: Rig, method: str, k: int) -> float:
    """Median milliseconds of a pass in the middle of a sequence, prefill not included."""
    engine = rig.engine(method, k)
    states = [engine.add(request) for request in requests_for(rig.prompts[:1], 0.0, 256, ignore_eos=True)]
    times = []
    while engine.has_work:
        started = time.perf_counter()
        passes = step(engine, states)
        times.append(1e3 * (time.perf_counter() - started) / passes)
    return statistics.median(times[5:])


def memory(rig: Rig) -> None:
    """What the runs so far took beyond weights and KV cache: graphs, activations, the allocator's, the driver's."""
    if not rig.device.startswith("cuda"):
        log("memory is measured on a GPU only")
        return
    free, total = torch.cuda.mem_get_info()
    rig.facts["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    rig.facts["extra_gib"] = (torch.cuda.max_memory_reserved() - rig.loaded) / 2**30
    rig.facts["extra_with_driver_gib"] = (total - free - rig.loaded) / 2**30
    log({name: value for name, value in rig.facts.items() if name.endswith("gib")})


def long_prompt(rig: Rig) -> None:
    length = min(4096, rig.target.info.max_seq_len - 1)
    ids = torch.randint(100, min(40000, rig.target.info.vocab_size), (length,))
    seq_cache = rig.target.new_cache()

    def native() -> None:
        rig.target.truncate(seq_cache, 0)
        rig.target.forward([Row.chain(seq_cache, ids)], last_only=True)

    rig.facts[f"prefill_{length}_ms"] = prefill_ms(native, rig.device)
    rig.target.free(seq_cache)
    model = in_transformers(rig.pair.large, rig.pair.large_config, rig.device)
    batch = ids[None].to(rig.device)
    with torch.inference_mode():
        hf_ms = prefill_ms(lambda: model(batch, logits_to_keep=1, use_cache=True), rig.device)
    rig.facts[f"prefill_{length}_ms_hf"] = hf_ms
    times = [value for name, value in rig.facts.items() if name.startswith("prefill")]
    log(f"prefill of {length} tokens, ms; paceline, transformers:", times)


def baselines(rig: Rig) -> None:
    """transformers on the same weights, plain and with the draft model as its assistant."""
    target = in_transformers(rig.pair.large, rig.pair.large_config, rig.device)
    draft = in_transformers(rig.pair.small, rig.pair.small_config, rig.device)
    draft.generation_config.num_assistant_tokens = 5
    for name, options in (("hf generate", {}), ("hf assistant", {"assistant_model": draft})):
        _transformers_tokens(rig, target, rig.prompts[0], 8, options)  # warms up
        tokens, started = 0, time.perf_counter()
        for prompt in rig.prompts[1:3]:
            draft.generation_config.num_assistant_tokens = 5
            tokens += _transformers_tokens(rig, target, prompt, 96, options)
        synchronize(rig.device)
        seconds = time.perf_counter() - started
        rig.add(Line(name, 1, 0.0, tokens / seconds, 0.0, 0.0, tokens, seconds))


def _transformers_tokens(rig: Rig, model: Any, prompt: list[int], length: int, options: dict[str, Any]) -> int:
    ids = torch.tensor([prompt], device=rig.device)
    settings = {"max_new_tokens": length, "do_sample": False, "pad_token_id": 2, **options}
    output = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
    return int(output.shape[1]) - len(prompt)


def tune_pair(rig: Rig) -> None:
    """What `paceline tune` would advise here, predicted and measured."""
    result = tune(rig.candidates, TunePlan(rig.prompts[::4], OutputLength(min(128, rig.args.length))))
    rig.facts["tune"] = [asdict(item) for item in result.confirmed]
    for item in result.confirmed:
        name = f"{item.method} k={item.num_draft_tokens}"
        log(f"tune: {name} predicted {item.predicted} measured {item.measured:.3f}")
    log(result.advice.sentence)


def save(rig: Rig) -> None:
    """The pair as a user would have it: FOLDER/target and FOLDER/draft."""
    folder, pair = Path(rig.args.save), rig.pair
    write_model(folder / "target", pair.large, pair.large_config, pair.tokenizer)
    write_model(folder / "draft", pair.small, pair.small_config, pair.tokenizer)
    log(f"saved the pair in {folder}")


PARTS: dict[str, Callable[[Rig], None]] = {
    "single": single,
    "passes": passes,
    "sampled": sampled,
    "batches": batches,
    "memory": memory,
    "tune": tune_pair,
    "prompt": long_prompt,
    "baselines": baselines,
    "sweep": sweep,
    "auto": auto,
    "head": head,  # last: a target that returns its hidden states has a little more to do
    "launches": launches,
}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", required=True, help="directory of the small model")
    parser.add_argument("--prompts", required=True, help="folder of *.jsonl with a prompt a line")
    parser.add_argument("--head", default=shipped_head("eagle", SMALL), help="an EAGLE head of the small model")
    parser.add_argument("--out", help="write the JSON document here too")
    parser.add_argument("--count", type=int, default=23, help="prompts")
    parser.add_argument("--length", type=int, default=256, help="tokens of an output")
    parser.add_argument("--kv-cache-tokens", type=int, default=65536)
    parser.add_argument("--batch-invariant", action="store_true", help="batches compute bit for bit what runs alone do")
    parser.add_argument("--save", help="write the pair here, as directories that the command line takes")
    parser.add_argument("--parts", help="some of single, passes, sampled, batches, memory, tune, prompt, baselines, …")
    parser.add_argument("--dry-run", action="store_true", help="inflate to twice the small model only; also on a CPU")
    return parser.parse_args()


def main() -> int:
    args = parse_args()
    if not torch.cuda.is_available() and not args.dry_run:
        print("the rig needs a CUDA device; --dry-run does not", file=sys.stderr)
        return 2
    Rig(args, "cuda" if torch.cuda.is_available() else "cpu").all()
    return 0


if __name__ == "__main__":
    sys.exit(main())
