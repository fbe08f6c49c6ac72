"""Every command line in the documents is one that its command takes, and manifests in them are whole."""

from __future__ import annotations

import importlib
import re
import shlex
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from paceline import cli
from paceline.cli.flags import CommandParser

ROOT = Path(__file__).parent.parent
DOCUMENTS = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])


def code_blocks(document: Path, language: str = r"\w*") -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", document.read_text(), re.DOTALL)


def command_lines(text: str) -> list[str]:
    """Lines of paceline, also behind a prompt or exec. A backslash joins lines."""
    lines = text.replace("\\\n", " ").splitlines()
    return [match[1] for line in lines if (match := re.match(r"\s*(?:\$ |exec )?(paceline \w.*)", line))]


def parse(words: list[str]) -> None:
    """Raises SystemExit for a line that the command does not take."""
    assert words[0] in cli.COMMANDS, f"there is no command {words[0]}"
    parser = CommandParser(prog=f"paceline {words[0]}")
    importlib.import_module(f"paceline.cli.{words[0]}").configure(parser)
    parser.parse_args(words[1:])


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_command_of_a_document_is_understood(document: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for line in (line for block in code_blocks(document) for line in command_lines(block)):
        try:
            parse(shlex.split(line, comments=True)[1:])
        except SystemExit as stop:
            assert stop.code == 0, f"{line}\n{capsys.readouterr().err}"


def test_a_command_that_does_not_parse_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["plan", "default", "--num-gpu", "2"])
    assert command_lines("$ paceline plan a \\\n  --json\n  exec paceline serve b\nray start") == [
        "paceline plan a    --json", "paceline serve b",
    ]  # fmt: skip


def manifests() -> list[dict[str, Any]]:
    yaml = pytest.importorskip("yaml")
    blocks = code_blocks(ROOT / "docs" / "distributed.md", "yaml")
    return [document for block in blocks for document in yaml.safe_load_all(block)]


def test_manifests_start_a_server_that_takes_their_arguments() -> None:
    """The container's arguments parse, its probes ask an open route, and the Service leads to its port."""
    from paceline.serve.auth import OPEN_PATHS

    by_kind = {document["kind"]: document for document in manifests() if document["metadata"]["name"] == "paceline"}
    [container] = by_kind["Deployment"]["spec"]["template"]["spec"]["containers"]
    parse(container["args"])
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"]["path"] in OPEN_PATHS
    [port] = by_kind["Service"]["spec"]["ports"]
    assert port["targetPort"] == container["ports"][0]["containerPort"] == int(container["args"][-1])
    assert by_kind["Service"]["spec"]["selector"] == by_kind["Deployment"]["spec"]["selector"]["matchLabels"]


def test_the_machines_of_a_ray_cluster_have_the_gpus_that_its_command_divides_over() -> None:
    [cluster] = [document for document in manifests() if document["kind"] == "StatefulSet"]
    [container] = cluster["spec"]["template"]["spec"]["containers"]
    [line] = command_lines(container["args"][0])
    words = shlex.split(line)
    parse(words[1:])
    flags = dict(pairwise(words))
    gpus = int(container["resources"]["limits"]["nvidia.com/gpu"]) * cluster["spec"]["replicas"]
    assert int(flags["--tensor-parallel-size"]) * int(flags["--pipeline-parallel-size"]) == gpus
    assert flags["--distributed-executor-backend"] == "ray"


def test_what_travels_is_what_the_document_computes() -> None:
    """Llama-3.1-70B: 80 layers of 8192 in bf16, k = 4, so 5 tokens a pass."""
    from paceline.plan.catalogue import find_model

    entry = find_model("llama-3.1-70b")
    assert entry is not None
    between_stages = 5 * entry.sizes.hidden_size * 2
    in_a_stage = 2 * entry.sizes.num_layers * between_stages
    text = (ROOT / "docs" / "distributed.md").read_text()
    assert f"{between_stages // 1024} KiB between two stages" in text
    assert f"{in_a_stage / (1 << 20):.1f} MiB a step" in text
