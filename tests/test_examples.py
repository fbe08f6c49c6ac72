"""The files of examples/: they parse, their commands are ours, and their probes ask routes that exist."""

from __future__ import annotations

import configparser
import json
import re
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from paceline.cli.flags import CommandParser
from paceline.cli.serve import Launch, configure
from paceline.cli.serve_config import arguments_of_models
from paceline.serve.app import create_app
from paceline.serve.auth import OPEN_PATHS
from paceline.serve.config import API_KEYS_VARIABLE, ServerConfig
from tests.serve.toy_engine import ReversingEngine

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
DOCKERFILES = sorted((EXAMPLES / "docker").glob("Dockerfile.*"))
MANIFESTS = sorted((EXAMPLES / "kubernetes").glob("*.yaml"))
CACHE_VARIABLES = ("PACELINE_CACHE",)


@pytest.fixture(autouse=True)
def api_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """The examples take keys from the environment."""
    monkeypatch.setenv(API_KEYS_VARIABLE, "a-key-of-the-environment")


@pytest.fixture(scope="module")
def routes() -> set[str]:
    document = create_app(ReversingEngine(), ServerConfig(("model",))).openapi()
    return {path for path, operations in document["paths"].items() if "get" in operations}


def launches_of(command: list[str], replaced: dict[str, str] | None = None) -> list[Launch]:
    """What `paceline serve …` would start. replaced: files that the command names, by the path in the example."""
    program, name, *arguments = [(replaced or {}).get(part, part) for part in command]
    assert Path(program).name == "paceline" and name == "serve"
    parser = CommandParser(prog="paceline serve")
    configure(parser)
    return [Launch.of(args) for args in arguments_of_models(parser.parse_args(arguments))]


def check_probe(path: str, routes: set[str]) -> None:
    assert path in routes, f"there is no route {path}"
    assert path in OPEN_PATHS, f"{path} needs an API key, which a probe does not have"


# --- configuration file -----------------------------------------------------------------------------------------------


def test_the_configuration_file_is_one() -> None:
    launches = launches_of(["paceline", "serve", "--config", str(EXAMPLES / "serve.toml")])
    assert [launch.server.served_model_names for launch in launches] == [("default", "small"), ("qwen",)]
    assert launches[1].engine.speculative.draft_model and launches[1].server.max_num_seqs == 8


# --- Docker -----------------------------------------------------------------------------------------------------------


def instructions(dockerfile: Path) -> list[tuple[str, str]]:
    """(FROM, …), (RUN, …) in their order."""
    text = re.sub(r"\\\n\s*", " ", dockerfile.read_text())
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(name, rest.strip()) for name, _, rest in (line.partition(" ") for line in lines)]


def values_of(dockerfile: Path, name: str) -> list[str]:
    return [rest for instruction, rest in instructions(dockerfile) if instruction == name]


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)
def test_a_dockerfile_installs_what_exists(dockerfile: Path) -> None:
    assert instructions(dockerfile)[0][0] == "FROM"
    for sources in values_of(dockerfile, "COPY"):
        assert all((ROOT / source).exists() for source in sources.split()[:-1]), sources
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    [installed] = re.findall(r"pip install .*'\.\[([\w,]+)\]'", dockerfile.read_text())
    assert "serve" in installed.split(",") and set(installed.split(",")) <= set(extras)
    python = values_of(dockerfile, "FROM")[0].partition("python:")[2]
    assert tuple(int(part) for part in re.findall(r"\d+", python)[:2]) >= (3, 11)


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)
def test_a_dockerfile_starts_a_server_that_its_health_check_reaches(dockerfile: Path, routes: set[str]) -> None:
    [entry], [arguments] = values_of(dockerfile, "ENTRYPOINT"), values_of(dockerfile, "CMD")
    [launch] = launches_of([*json.loads(entry), *json.loads(arguments)])
    assert values_of(dockerfile, "EXPOSE") == [str(launch.server.network.port)]
    assert not launch.server.network.is_loopback, "a port of a container is reached from outside"
    [check] = values_of(dockerfile, "HEALTHCHECK")
    probe = re.search(r"http://127\.0\.0\.1:(\d+)(/[\w/]*)", check)
    assert probe and int(probe[1]) == launch.server.network.port
    check_probe(probe[2], routes)
    assert values_of(dockerfile, "USER") == ["10001"], "not as root"


# --- Kubernetes -------------------------------------------------------------------------------------------------------


def documents(kind: str) -> list[Any]:
    parsed = [document for manifest in MANIFESTS for document in yaml.safe_load_all(manifest.read_text())]
    return [document for document in parsed if document["kind"] == kind]


def config_files(folder: Path) -> dict[str, str]:
    """The files of the config maps, written where a test can read them, by their path in the container."""
    replaced = {}
    for document in documents("ConfigMap"):
        for name, text in document["data"].items():
            (folder / name).write_text(text)
            replaced[f"/etc/paceline/{name}"] = str(folder / name)
    return replaced


@pytest.mark.parametrize("deployment", documents("Deployment"), ids=lambda document: document["metadata"]["name"])
def test_a_deployment_starts_a_server_that_its_probes_reach(
    deployment: Any, routes: set[str], tmp_path: Path
) -> None:
    pod = deployment["spec"]["template"]["spec"]
    [container] = pod["containers"]
    launches = launches_of([*container["command"], *container["args"]], config_files(tmp_path))
    network, limits = launches[0].server.network, launches[0].server.limits
    assert [port["containerPort"] for port in container["ports"]] == [network.port] and not network.is_loopback
    for name, path in (("startupProbe", "ready"), ("readinessProbe", "ready"), ("livenessProbe", "live")):
        probe = container[name]["httpGet"]
        assert probe["path"] == f"/health/{path}" and probe["port"] == container["ports"][0]["name"]
        check_probe(probe["path"], routes)
    assert pod["terminationGracePeriodSeconds"] > limits.drain_timeout
    assert {variable["name"] for variable in container["env"]} == {API_KEYS_VARIABLE, *CACHE_VARIABLES}


@pytest.mark.parametrize("deployment", documents("Deployment"), ids=lambda document: document["metadata"]["name"])
def test_the_parts_of_the_manifests_find_each_other(deployment: Any) -> None:
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert deployment["spec"]["selector"]["matchLabels"].items() <= labels.items()
    [service] = documents("Service")
    pod = deployment["spec"]["template"]["spec"]
    [container] = pod["containers"]
    assert service["spec"]["selector"].items() <= labels.items()
    assert service["spec"]["ports"][0]["targetPort"] == container["ports"][0]["name"]
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == set(volumes)
    claims = {claim["metadata"]["name"] for claim in documents("PersistentVolumeClaim")}
    assert volumes["cache"]["persistentVolumeClaim"]["claimName"] in claims
    tags = {path.name.partition(".")[2] for path in DOCKERFILES}
    assert container["image"].partition(":")[2] in tags, "an image that a Dockerfile beside it builds"


# --- systemd ----------------------------------------------------------------------------------------------------------


def unit() -> configparser.ConfigParser:
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read(EXAMPLES / "systemd" / "paceline.service")
    return parser


def test_the_unit_starts_a_server_and_waits_for_its_requests() -> None:
    service = unit()["Service"]
    command = shlex.split(service["ExecStart"])
    launches = launches_of(command, {"/etc/paceline/serve.toml": str(EXAMPLES / "serve.toml")})
    assert int(service["TimeoutStopSec"]) > launches[0].server.limits.drain_timeout
    assert service["Restart"] == "on-failure" and service["KillSignal"] == "SIGTERM"
    assert service["Environment"].partition("=")[0] in CACHE_VARIABLES


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd here")
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    """With a program that exists in place of ours, which is not installed where tests run."""
    text = (EXAMPLES / "systemd" / "paceline.service").read_text()
    copy = tmp_path / "paceline.service"
    copy.write_text(text.replace("/opt/paceline/.venv/bin/paceline", "/bin/sh"))
    command = ["systemd-analyze", "verify", "--man=no", str(copy)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    complaints = [line for line in result.stderr.splitlines() if "paceline.service" in line]
    assert complaints == [], result.stderr
