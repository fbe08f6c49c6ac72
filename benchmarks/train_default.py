"""Train the shipped EAGLE head within a number of minutes: the target generates data, the head learns, prompts are
scored.

    PYTHONPATH=src python3 benchmarks/train_default.py --model DIR --out OUT --minutes 9 --keep-data
    PYTHONPATH=src python3 benchmarks/train_default.py --model DIR --out OUT --minutes 9 --data DATA --init HEAD
    PYTHONPATH=src python3 benchmarks/train_default.py --join OUT --into HEAD       # puts the parts together

OUT holds at most 8 files of at most 15 MiB: config.json, model.safetensors.N, result.json, README.md, curve.png, and
with --keep-data sequences.N. `--join` puts the parts together: the head in HEAD, the sequences in HEAD/sequences,
which --data takes. The head is written repeatedly during training, so an interrupted run leaves a usable one.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import threading
import time
import zlib
from pathlib import Path
from typing import Any

BEGAN = time.monotonic()
PART = 15 * 2**20 - 4096
MOST_DATA_PARTS = 2


def main() -> int:
    args = parse()
    if args.join:
        join(Path(args.join), Path(args.into))
        return 0
    if not args.model or not args.out:
        sys.exit("--model and --out are needed")
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    watchdog(args.minutes * 60)
    Run(args, out).all()
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="directory of the target")
    parser.add_argument("--out")
    parser.add_argument("--minutes", type=float, default=9.0, help="for everything, from the start of this process")
    parser.add_argument("--data", help="folder of sequences from an earlier run; new ones are added")
    parser.add_argument("--init", help="folder of a head to start from")
    parser.add_argument("--keep-data", action="store_true", help="write the sequences to OUT too")
    parser.add_argument("--prompts", default="shared/prompts", help="folder of *.jsonl with prompts to score, if there")
    parser.add_argument("--data-share", type=float, default=0.36, help="of the minutes")
    parser.add_argument("--eval-seconds", type=float, default=45.0)
    parser.add_argument("--max-num-seqs", type=int, default=0, help="sequences generated at a time")
    parser.add_argument("--max-seq-len", type=int, default=1152)
    parser.add_argument("--batch-tokens", type=int, default=32768)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--ttt-steps", type=int, default=5, help="drafting steps unrolled in training")
    parser.add_argument("--step-decay", type=float, default=0.85)
    parser.add_argument("--greedy-weight", type=float, default=0.5)
    parser.add_argument("--draft-vocab-size", type=int, default=8192)
    parser.add_argument("--intermediate-size", type=int, default=0)
    parser.add_argument("--new-tokens", type=int, default=256, help="tokens generated per scored prompt")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--join", help="put the parts of this folder together")
    parser.add_argument("--into", default="head")
    return parser.parse_args()


def say(line: str) -> None:
    print(f"[{time.monotonic() - BEGAN:6.1f} s] {line}", flush=True)


def watchdog(seconds: float) -> None:
    """The last resort: what is written is written."""

    def stop() -> None:
        say("out of time; stopping with what has been written")
        os._exit(3)

    timer = threading.Timer(max(1.0, seconds - (time.monotonic() - BEGAN)), stop)
    timer.daemon = True
    timer.start()


class Run:
    """One run, stage by stage."""

    def __init__(self, args: argparse.Namespace, out: Path) -> None:
        import torch

        from paceline.hub.tokenizer import load_tokenizer
        from paceline.runners.loading import load_model
        from paceline.train.placement import target_dtype

        torch.manual_seed(args.seed)
        torch.set_float32_matmul_precision("high")
        self.args, self.out = args, out
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        folder = Path(args.model)
        self.model = load_model(folder, folder.name, target_dtype(self.device), self.device)
        self.tokenizer = load_tokenizer(folder, folder.name)
        self.work = Path(tempfile.mkdtemp(prefix="train-"))
        self.result: dict[str, Any] = {"arguments": settings_of(args), "device": device_name(self.device)}
        self._last_line = 0.0
        say(f"loaded {folder.name} on {self.result['device']}")

    def all(self) -> None:
        corpus = self.collect()
        if self.args.keep_data:
            write_sequences(corpus, self.out)
        task, history = self.train(corpus)
        self.result["steps"], self.result["trained_tokens"] = history.step, history.tokens
        self.result["trained_seconds"] = history.seconds
        self.result["held_out"] = [[m.step, m.tokens_per_step, m.by_position] for m in history.measurements]
        self.result["losses"] = [round(loss, 4) for loss in history.losses[::10]]
        self.write_head(task, history)
        self.result["prompts"] = self.score(task)
        self.write_head(task, history)
        say("done: " + json.dumps(self.result["prompts"].get("overall", {})))
        shutil.rmtree(self.work)

    def left(self) -> float:
        return self.args.minutes * 60 - (time.monotonic() - BEGAN)

    # --- stages -------------------------------------------------------------------------------------------------------

    def collect(self) -> Any:
        from paceline.build import build_engine
        from paceline.train.collect import CollectOptions, collect
        from paceline.train.writers import writers_of

        args, folder = self.args, self.work / "sequences"
        folder.mkdir()
        for path in sorted(Path(args.data).glob("sequences-*.safetensors")) if args.data else []:
            shutil.copy(path, folder / path.name)
        seconds = max(1.0, args.data_share * args.minutes * 60 - (time.monotonic() - BEGAN))
        options = CollectOptions(10**12, seconds / 60, args.max_seq_len, args.max_num_seqs, args.seed)
        writers = writers_of(build_engine, self.model, self.tokenizer, options)
        corpus = collect(writers, self.tokenizer, folder, options, self.on_collect)
        del writers  # with its engine, whose memory training needs
        say(f"{len(corpus)} sequences, {corpus.tokens.size} tokens, {corpus.answer_tokens} of them in answers")
        self.result |= {"num_seqs": len(corpus), "tokens": int(corpus.tokens.size), "answers": corpus.answer_tokens}
        if self.device == "cuda":
            import torch

            torch.cuda.empty_cache()
        return corpus

    def train(self, corpus: Any) -> tuple[Any, Any]:
        from paceline.runners.loading import eos_token_ids_of
        from paceline.train.corpus import BatchSampler, frequent_tokens, split
        from paceline.train.eagle import EagleOptions, EagleTask
        from paceline.train.loop import LoopOptions, TrainingLoop
        from paceline.train.teacher import Teacher

        args, parts, teacher = self.args, split(corpus, self.args.seed), Teacher(self.model)
        options = EagleOptions(
            args.draft_vocab_size, args.intermediate_size, args.ttt_steps, args.step_decay, args.greedy_weight
        )
        eos_ids = eos_token_ids_of(self.model)
        target_ids = frequent_tokens(parts.train, teacher.vocab_size, args.draft_vocab_size, eos_ids)
        covered = share_inside(parts.held_out, target_ids)
        say(f"{len(parts.train)} sequences to train on, {len(parts.held_out)} held out; tokens covered {covered:.4f}")
        task = EagleTask(teacher, target_ids, options, "HuggingFaceTB/SmolLM2-135M-Instruct")
        sample = next(BatchSampler(parts.train, args.batch_tokens, args.seed).once()).to(teacher.device)
        if args.init:
            task.start_from(Path(args.init), sample)
        else:
            task.start(sample)
        seconds = max(1.0, self.left() - args.eval_seconds)
        loop_options = LoopOptions(
            0, seconds / 60, args.batch_tokens, args.learning_rate, save_every=10**9, eval_every=300
        )
        folder = self.work / "loop"
        loop = TrainingLoop(task, parts, folder, loop_options, lambda progress: self.on_step(progress, task, loop))
        return task, loop.run()

    def score(self, task: Any) -> dict[str, Any]:
        """Greedy steps over the target's own answers to the prompts, per category, as chat and as raw text."""
        folder = Path(self.args.prompts)
        if not folder.is_dir():
            say(f"no prompts in {folder}; nothing to score")
            return {}
        scores: dict[str, Any] = {}
        for form in ("chat", "raw"):
            scores[form] = self.score_form(task, folder, form)
            if scores[form]:
                rows = scores[form].items()
                say(f"{form}: " + ", ".join(f"{name} {row['tokens_per_step']:.3f}" for name, row in rows))
        scores["overall"] = {form: row["all"]["tokens_per_step"] for form, row in scores.items() if row}
        return scores

    def score_form(self, task: Any, folder: Path, form: str) -> dict[str, Any]:
        from paceline.core.stats import SpecStats
        from paceline.train.corpus import BatchSampler, Corpus, TrainingSequence
        from paceline.train.measure import measure

        plans = self.prompt_plans(folder, form)
        if self.left() < 8 or not plans:
            return {}
        seqs = [TrainingSequence(seq.tokens, seq.start, seq.plan.tag) for seq in self.answers(plans)]
        names = sorted(path.stem for path in folder.glob("*.jsonl"))
        stats = {name: SpecStats() for name in names}
        for number, name in enumerate(names):
            category = [seq for seq in seqs if seq.domain == number]
            if category:
                sampler = BatchSampler(Corpus.of(category), self.args.batch_tokens, 0)
                stats[name] = measure(task, sampler.once())
        stats["all"] = SpecStats()
        for name in names:
            stats["all"].add(stats[name])
        return {name: category.as_dict() for name, category in stats.items() if category.steps}

    def prompt_plans(self, folder: Path, form: str) -> list[Any]:
        from paceline.hub.tokenizer import Tokenizer
        from paceline.train.sequence_writer import answer_plan

        tokenizer, plans = Tokenizer(self.tokenizer), []
        for number, path in enumerate(sorted(folder.glob("*.jsonl"))):
            for line in path.read_text().splitlines():
                prompt = json.loads(line)["prompt"]
                ids = tokenizer.encode([{"role": "user", "content": prompt}] if form == "chat" else prompt)
                plans.append(answer_plan(ids, 0.0, len(ids) + self.args.new_tokens, number))
        return plans

    def answers(self, plans: list[Any]) -> list[Any]:
        from paceline.build import build_engine
        from paceline.train.collect import CollectOptions
        from paceline.train.engine_writer import EngineWriters
        from paceline.train.sequence_writer import WriterLimits

        limits = WriterLimits(len(plans), max(plan.max_len for plan in plans))
        options = CollectOptions(max_num_seqs=limits.num_seqs, max_seq_len=max(64, limits.max_len))
        writer = EngineWriters(build_engine, self.model, self.tokenizer, options).open(limits)
        return list(writer.write(iter(plans), lambda: self.left() < 6))

    # --- progress -------------------------------------------------------------------------------------------------

    def on_collect(self, progress: Any) -> None:
        if time.monotonic() - self._last_line > 10:
            self._last_line = time.monotonic()
            speed = progress.answer_tokens / max(progress.seconds, 1e-9)
            say(f"{progress.num_seqs} sequences, {progress.answer_tokens} answer tokens, {speed:.0f} tokens/s")

    def on_step(self, progress: Any, task: Any, loop: Any) -> None:
        if progress.step % 300 == 0:
            self.write_head(task, loop.history)
        if time.monotonic() - self._last_line > 10 or progress.step == 1:
            self._last_line = time.monotonic()
            last = progress.measurement
            places = " ".join(f"{share:.3f}" for share in last.by_position)
            say(
                f"step {progress.step} loss {progress.loss:.4f} rate {progress.learning_rate:.2e} "
                f"{progress.tokens_per_second:.0f} tokens/s {progress.seconds_left:.0f} s left; "
                f"held out {last.tokens_per_step:.3f} ({places})"
            )

    def write_head(self, task: Any, history: Any) -> None:
        from paceline.train.report import DrafterFacts, plot, write_readme

        folder = self.work / "head"
        task.export(folder)
        size = sum(weight.numel() for weight in task.module.parameters())
        data = (
            f"{self.result['num_seqs']} sequences ({self.result['tokens']} tokens) generated by the target itself: "
            "questions it invented after short openings, functions and passages from the Python standard library's "
            "docstrings as prompts; its answers greedy and at temperatures 0.5 to 1. No public data set."
        )
        data += " The head starts from one that was trained in the same way." if self.args.init else ""
        scores = self.result.get("prompts", {})
        facts = DrafterFacts("eagle", "SmolLM2-135M-Instruct", data, size, settings_of(self.args), scores)
        write_readme(folder, facts, history)
        plot(history, self.out / "curve.png")
        shutil.copy(folder / "config.json", self.out / "config.json")
        shutil.copy(folder / "README.md", self.out / "README.md")
        write_parts((folder / "model.safetensors").read_bytes(), self.out, "model.safetensors")
        (self.out / "result.json").write_text(json.dumps(self.result))


def settings_of(args: argparse.Namespace) -> dict[str, Any]:
    """The settings that shaped the head, without folders."""
    places = {"model", "out", "data", "init", "prompts", "join", "into"}
    return {name: value for name, value in vars(args).items() if name not in places}


def device_name(device: str) -> str:
    import torch

    return torch.cuda.get_device_name() if device == "cuda" else "CPU"


def share_inside(corpus: Any, vocabulary: Any) -> float:
    import numpy

    return float(numpy.isin(corpus.tokens, vocabulary.numpy()).mean())


# --- parts ------------------------------------------------------------------------------------------------------------


def write_parts(data: bytes, folder: Path, name: str) -> int:
    """Write NAME.0, NAME.1, … of at most PART bytes; returns how many."""
    count = -(-len(data) // PART)
    for number in range(count):
        unfinished = folder / f".{name}.part"
        unfinished.write_bytes(data[number * PART : (number + 1) * PART])
        os.replace(unfinished, folder / f"{name}.{number}")
    return count


def read_parts(folder: Path, name: str) -> bytes:
    paths = sorted(folder.glob(f"{name}.[0-9]"), key=lambda path: int(path.name.rsplit(".", 1)[1]))
    return b"".join(path.read_bytes() for path in paths)


def write_sequences(corpus: Any, folder: Path) -> None:
    """As many sequences as fit into the allowed parts."""
    import numpy

    share = 1.0
    while True:
        kept = corpus if share == 1.0 else corpus.pick(numpy.arange(int(share * len(corpus))))
        with tempfile.TemporaryDirectory() as place:
            kept.save(Path(place) / "sequences.safetensors")
            packed = zlib.compress((Path(place) / "sequences.safetensors").read_bytes(), 6)
        if len(packed) <= MOST_DATA_PARTS * PART:
            break
        share *= 0.98 * MOST_DATA_PARTS * PART / len(packed)
    say(f"{len(kept)} sequences in {write_parts(packed, folder, 'sequences')} parts, {len(packed) / 2**20:.1f} MiB")


def join(folder: Path, into: Path) -> None:
    """Put a head, and sequences where there are any, together again."""
    into.mkdir(parents=True, exist_ok=True)
    for name in ("config.json", "README.md", "curve.png", "result.json"):
        if (folder / name).is_file():
            shutil.copyfile(folder / name, into / name)
    (into / "model.safetensors").write_bytes(read_parts(folder, "model.safetensors"))
    packed = read_parts(folder, "sequences")
    if packed:
        (into / "sequences").mkdir(exist_ok=True)
        (into / "sequences" / "sequences-000.safetensors").write_bytes(zlib.decompress(packed))


if __name__ == "__main__":
    sys.exit(main())
