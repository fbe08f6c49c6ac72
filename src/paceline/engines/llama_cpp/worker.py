"""The process that llama.cpp runs in: an error in it, or its end, takes nothing else with it.

Run as a script, without the package: one line of JSON on stdin holds the settings, one line on stdout the address of
the server or the reason why there is none. The process ends when its stdin does, so it never outlives its engine.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

Settings = dict[str, Any]


def main() -> None:
    settings: Settings = json.loads(sys.stdin.readline())
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # llama.cpp may print there
    try:
        server = open_server(settings)
        answer: Settings = {"url": server.listening_address, "devices": device_names()}
    except Exception as error:  # the parent reports it, whatever it is
        answer = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps(answer), file=answers, flush=True)
    sys.stdin.read()
    os._exit(0)  # what is left of running requests is not waited for


def open_server(settings: Settings) -> Any:
    import xllamacpp

    params = xllamacpp.CommonParams()
    apply_settings(params, settings["params"], xllamacpp)
    speculative = settings["speculative"]
    if speculative["types"]:
        kinds = xllamacpp.common_speculative_type
        params.speculative.types = [speculative_type(kinds, name) for name in speculative["types"]]
    apply_settings(params.speculative, speculative["params"], xllamacpp)
    return xllamacpp.Server(params)


def speculative_type(kinds: Any, name: str) -> Any:
    if not hasattr(kinds, f"COMMON_SPECULATIVE_TYPE_{name}"):
        raise ValueError(f"this version of xllamacpp does not have {name.lower()}")
    return getattr(kinds, f"COMMON_SPECULATIVE_TYPE_{name}")


def device_names() -> list[str]:
    """Devices beside the CPU."""
    import xllamacpp

    devices = [(str(device["name"]), str(device["type"])) for device in xllamacpp.get_device_info()]
    return [name for name, kind in devices if "GPU" in kind]


def apply_settings(target: Any, settings: Settings, package: Any) -> None:
    """Set `{"cpuparams.n_threads": 2}` on a nested object. A value `ggml_type.Q8_0` names a constant."""
    for path, value in settings.items():
        *parents, name = path.split(".")
        owner = target
        for parent in parents:
            owner = getattr(owner, parent)
        if isinstance(value, str) and value.startswith("ggml_type."):
            value = getattr(package.ggml_type, f"GGML_TYPE_{value.partition('.')[2]}")
        setattr(owner, name, value)


if __name__ == "__main__":
    main()
