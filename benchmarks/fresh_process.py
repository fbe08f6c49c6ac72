"""One row of benchmarks/fresh.py: a process that loads a model and meets all prompts twice.

    python benchmarks/fresh_process.py JOB.json OUT.json     as fresh.py starts it

Rows of benchmarks/domains.py take turns: all processes are there at once, and each meets the same prompt before any
meets the next one, so that a machine that gets slower slows all of them alike.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

PLAIN, DRAFT, AUTO = "plain", "draft", "auto"
LOCAL = "local"
READY, DONE = "ready", "done"  # what a process that takes turns says
HF, LLAMA_CPP = "hf", "llama_cpp"
HF_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


@dataclass(frozen=True, slots=True)
class Job:
    """What one process does."""

    name: str
    batch: int
    prompts: list[str]
    model: str
    kind: str = "paceline"
    draft: str | None = None
    dtype: str | None = None
    device: str | None = None
    method: str | None = None
    num_draft_tokens: int | str = AUTO
    max_new_tokens: int = 128
    raw: bool = False
    gguf: str | None = None
    engine: str = LOCAL
    python: str | None = None
    predictions: list[str | None] | None = None  # of each prompt: the output that the client expects
    once: bool = False  # no second time
    in_turns: bool = False  # each prompt waits until its turn comes
    engine_options: dict[str, Any] = field(default_factory=dict)
    max_model_len: int | None = None
    row_seconds: float | None = None


@dataclass(slots=True)
class Pass:
    """All prompts once. outputs: token ids, or texts where a peer gives no ids; each: seconds of every call."""

    tokens: int = 0
    seconds: float = 0.0
    steps: int = 0
    accepted: int = 0
    outputs: list[Any] = field(default_factory=list)
    each: list[float] = field(default_factory=list)

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


@dataclass(frozen=True, slots=True)
class FreshResult:
    """What one process measured, or why it failed."""

    job: Job
    first: Pass = field(default_factory=Pass)
    warm: Pass = field(default_factory=Pass)
    ready: float = 0.0
    error: str | None = None

    @property
    def tau(self) -> float | None:
        steps = self.first.steps + self.warm.steps
        return 1 + (self.first.accepted + self.warm.accepted) / steps if steps else None


# --- one process ------------------------------------------------------------------------------------------------------

GenerateBatch = Callable[[list[str], Pass], None]  # adds the outputs and counts of one call


def run_job(job: Job, started: float) -> FreshResult:
    """In the fresh process: load, then all prompts twice. started: when the process was started."""
    generate = {"paceline": open_paceline, HF: open_hf, LLAMA_CPP: open_llama_cpp}[job.kind](job)
    ready = time.time() - started
    if job.in_turns:
        tell(READY)
    result = FreshResult(job, measured(job, generate), Pass() if job.once else measured(job, generate), ready)
    if job.in_turns:
        sys.stdin.readline()  # ending is work too: not while another one measures
    return result


def measured(job: Job, generate: GenerateBatch) -> Pass:
    """One prompt after another; or all at once, of which the engine takes `batch` at a time: where one ends, the next
    begins, as in a server."""
    result, together = Pass(), 1 if job.batch == 1 else max(1, len(job.prompts))
    for start in range(0, len(job.prompts), together):
        if job.in_turns and sys.stdin.readline() == "":
            raise RuntimeError("the benchmark has ended")
        began = time.perf_counter()
        generate(job.prompts[start : start + together], result)
        result.each.append(time.perf_counter() - began)
        result.seconds += result.each[-1]
        if job.in_turns:
            tell(DONE)
    return result


def tell(word: str) -> None:
    """The process that started this one."""
    print(word, flush=True)


def open_paceline(job: Job) -> GenerateBatch:
    from paceline import SpeculativeDecoder

    logging.basicConfig(format="%(message)s")
    logging.getLogger("paceline.build").setLevel(logging.DEBUG)  # what the time to ready is made of
    decoder = SpeculativeDecoder(job.model, **decoder_options(job))
    as_chat = not job.raw and bool(getattr(decoder.tokenizer.hf_tokenizer, "chat_template", None))

    def generate(prompts: list[str], result: Pass) -> None:
        asked = [[{"role": "user", "content": prompt}] if as_chat else prompt for prompt in prompts]
        settings: dict[str, Any] = {"max_new_tokens": job.max_new_tokens, "temperature": 0.0}
        if job.predictions is not None and job.predictions[len(result.outputs)] is not None:
            settings["prediction"] = job.predictions[len(result.outputs)]  # of all prompts of the call
        for answer in decoder.generate(asked, **settings):
            result.tokens += len(answer.token_ids)
            result.steps += answer.stats.steps
            result.accepted += answer.stats.accepted
            result.outputs.append(answer.token_ids)

    return generate


def decoder_options(job: Job) -> dict[str, Any]:
    """No prefix cache: the second time a prompt is read as the first time."""
    options: dict[str, Any] = {"prefix_cache_tokens": 0, "max_num_seqs": job.batch, "num_draft_tokens": 0}
    if job.method is not None:
        options |= {"method": job.method, "num_draft_tokens": job.num_draft_tokens, "draft_model": job.draft}
    options |= {"dtype": job.dtype, "device": job.device, "engine": job.engine, "max_model_len": job.max_model_len}
    if job.engine_options:
        options["engine_options"] = job.engine_options
    return {name: value for name, value in options.items() if value is not None}


def open_hf(job: Job) -> GenerateBatch:
    """transformers' own generate, one sequence at a time: its assisted generation takes no batch."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from paceline.hub import locate

    dtype = getattr(torch, HF_DTYPES[job.dtype or "fp32"])
    device = job.device or ("cuda" if torch.cuda.is_available() else "cpu")

    def load(name: str) -> Any:
        return AutoModelForCausalLM.from_pretrained(locate(name).folder, dtype=dtype).to(device).eval()

    tokenizer = AutoTokenizer.from_pretrained(locate(job.model).folder)
    model, options = load(job.model), {}
    if job.method == DRAFT:
        options = {"assistant_model": load(str(job.draft))}
    elif job.method is not None:
        options = {"prompt_lookup_num_tokens": job.num_draft_tokens}
    as_chat = not job.raw and bool(tokenizer.chat_template)

    def generate(prompts: list[str], result: Pass) -> None:
        for prompt in prompts:
            ids = _hf_ids(tokenizer, prompt, as_chat).to(device)
            limits = {"max_new_tokens": job.max_new_tokens, "do_sample": False, "pad_token_id": 0}
            with torch.inference_mode():
                output = model.generate(ids, attention_mask=torch.ones_like(ids), **limits, **options)
            generated = output[0, ids.shape[1] :].tolist()
            result.tokens += len(generated)
            result.outputs.append(generated)

    return generate


def _hf_ids(tokenizer: Any, prompt: str, as_chat: bool) -> Any:
    if not as_chat:
        return tokenizer(prompt, return_tensors="pt").input_ids
    messages = [{"role": "user", "content": prompt}]
    options = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}
    return tokenizer.apply_chat_template(messages, **options)["input_ids"]


def open_llama_cpp(job: Job) -> GenerateBatch:
    """llama.cpp through xllamacpp, one sequence at a time; its texts are those of another weight format."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(job.gguf)
    params.n_ctx, params.n_parallel, params.cache_ram_mib = 4096, 1, 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = os.cpu_count() or 1
    server = xllamacpp.Server(params)

    def generate(prompts: list[str], result: Pass) -> None:
        for prompt in prompts:
            body = {"max_tokens": job.max_new_tokens, "temperature": 0.0, "cache_prompt": False}
            ask = server.handle_completions if job.raw else server.handle_chat_completions
            body |= {"prompt": prompt} if job.raw else {"messages": [{"role": "user", "content": prompt}]}
            answer = ask(body)
            if "usage" not in answer:
                raise RuntimeError(f"llama.cpp answered {answer}")
            result.tokens += answer["usage"]["completion_tokens"]
            result.outputs.append(str(answer["choices"][0]))

    return generate


# --- starting it ------------------------------------------------------------------------------------------------------


def in_fresh_process(job: Job) -> FreshResult:
    """Run one job in a process of its own; a failure becomes a row that says so."""
    print(f"{job.name}, batch {job.batch} …", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        files = JobFiles(Path(folder))
        try:
            done = run_whole(files.command(job), job.row_seconds)
        except subprocess.TimeoutExpired:
            return FreshResult(job, error=f"not finished after {job.row_seconds:g} s")
        return files.result(job, done.returncode, done.stderr)


@dataclass(frozen=True, slots=True)
class JobFiles:
    """What is handed to a process, and what it hands back."""

    folder: Path

    @property
    def out(self) -> Path:
        return self.folder / "out.json"

    def command(self, job: Job) -> list[str]:
        job_file = self.folder / "job.json"
        job_file.write_text(json.dumps({"job": asdict(job), "started": time.time()}))
        return [job.python or sys.executable, __file__, str(job_file), str(self.out)]

    def result(self, job: Job, status: int, errors: str) -> FreshResult:
        if status or not self.out.exists():
            lines = [line for line in errors.splitlines() if line.strip()]
            return FreshResult(job, error=lines[-1] if lines else f"exit status {status}")
        document = json.loads(self.out.read_text())
        result = FreshResult(job, Pass(**document["first"]), Pass(**document["warm"]), document["ready"])
        # Said at once: whatever ends a long run later does not take this figure with it.
        print(f"  first {result.first.rate:.1f}, warm {result.warm.rate:.1f} tokens/s", file=sys.stderr, flush=True)
        return result


class JobInTurns:
    """A process that takes turns. Its model is loaded when it has been made, or it has failed."""

    def __init__(self, job: Job, folder: Path) -> None:
        print(f"{job.name} …", file=sys.stderr, flush=True)
        self.job, self.files, self._errors = job, JobFiles(folder), (folder / "errors").open("w+")
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self._errors, "text": True}
        self.process = subprocess.Popen(self.files.command(job), **pipes, start_new_session=True)
        self.has_failed = not self._waits_for(READY)

    def take_turn(self) -> None:
        if self.has_failed:
            return
        assert self.process.stdin is not None
        try:
            print(file=self.process.stdin, flush=True)
        except BrokenPipeError:
            self.has_failed = True
            return
        self.has_failed = not self._waits_for(DONE)

    def result(self) -> FreshResult:
        """Lets the process end."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        status = self.process.wait()
        self._errors.seek(0)
        return self.files.result(self.job, status, self._errors.read())

    def end(self) -> None:
        """Harmless for one that has ended."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        for stream in (self.process.stdin, self.process.stdout, self._errors):
            with contextlib.suppress(BrokenPipeError):
                stream.close()

    def _waits_for(self, word: str) -> bool:
        """Whether the process says this before it ends. Libraries may print other lines."""
        assert self.process.stdout is not None
        return any(line.strip() == word for line in iter(self.process.stdout.readline, ""))


def in_turns(jobs: list[Job]) -> list[FreshResult]:
    """All jobs at once, each in a fresh process. They load one after another; then each meets the first prompt, each
    the second, and so on, now in one order and now in the other."""
    processes: list[JobInTurns] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            for number, job in enumerate(jobs):
                own = Path(folder) / str(number)
                own.mkdir()
                processes.append(JobInTurns(replace(job, in_turns=True), own))
            for turn in range(len(jobs[0].prompts)):
                for process in processes[:: -1 if turn % 2 else 1]:
                    process.take_turn()
            return [process.result() for process in processes]
        finally:
            for process in processes:
                process.end()


def run_whole(command: list[str], seconds: float | None) -> subprocess.CompletedProcess[str]:
    """Run a command; where its time is up, it ends with every process that it has started. Raises TimeoutExpired."""
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    with subprocess.Popen(command, **pipes) as process:
        try:
            _, errors = process.communicate(timeout=seconds)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    return subprocess.CompletedProcess(command, process.returncode, "", errors)


def child(job_file: str, out: str) -> int:
    document = json.loads(Path(job_file).read_text())
    result = run_job(Job(**document["job"]), document["started"])
    Path(out).write_text(json.dumps(asdict(result)))
    return 0


if __name__ == "__main__":
    sys.exit(child(*sys.argv[1:3]))
