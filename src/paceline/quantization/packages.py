"""Packages that quantized checkpoints are read with, where transformers reads them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec

from paceline.errors import ModelError


@dataclass(frozen=True, slots=True)
class Requirement:
    """How a format is called, and the modules it needs by the names pip installs them under."""

    title: str
    modules: Mapping[str, str]


ACCELERATE = {"accelerate": "accelerate"}
REQUIREMENTS: Mapping[str, Requirement] = {
    "aqlm": Requirement("AQLM", {"aqlm": "'aqlm[gpu,cpu]'"} | ACCELERATE),
    "auto-round": Requirement("AutoRound", {"auto_round": "auto-round"}),
    "awq": Requirement("AWQ", {"gptqmodel": "gptqmodel"} | ACCELERATE),
    "bitnet": Requirement("BitNet", ACCELERATE),
    "bitsandbytes": Requirement("bitsandbytes", {"bitsandbytes": "bitsandbytes"} | ACCELERATE),
    "compressed-tensors": Requirement("compressed-tensors", {"compressed_tensors": "compressed-tensors"}),
    "eetq": Requirement("EETQ", {"kernels": "kernels"} | ACCELERATE),
    "fbgemm_fp8": Requirement("FBGEMM fp8", {"fbgemm_gpu": "fbgemm-gpu"} | ACCELERATE),
    "fp8": Requirement("fp8", ACCELERATE),
    "fp_quant": Requirement("FP-Quant", {"fp_quant": "fp_quant"}),
    "gptq": Requirement("GPTQ", {"gptqmodel": "gptqmodel", "optimum": "optimum"}),
    "higgs": Requirement("HIGGS", {"flute": "flute-kernel"} | ACCELERATE),
    "hqq": Requirement("HQQ", {"hqq": "hqq"}),
    "mxfp4": Requirement("MXFP4", ACCELERATE),
    "quanto": Requirement("quanto", {"optimum.quanto": "optimum-quanto"} | ACCELERATE),
    "quark": Requirement("Quark", {"quark": "amd-quark"}),
    "spqr": Requirement("SpQR", {"spqr_quant": "'spqr_quant[gpu]'"} | ACCELERATE),
    "torchao": Requirement("torchao", {"torchao": "torchao"}),
    "vptq": Requirement("VPTQ", {"vptq": "vptq"} | ACCELERATE),
}


def check_packages(method: str, name: str) -> None:
    """Raise ModelError, with the pip line, where a package that reads this quantization method is not installed."""
    requirement = REQUIREMENTS.get(method.removesuffix("_4bit").removesuffix("_8bit"))
    if requirement is None:
        return
    missing = [package for module, package in requirement.modules.items() if not _installed(module)]
    if missing:
        raise ModelError(f"{name} is quantized with {requirement.title}; to read it: pip install {' '.join(missing)}")


def _installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # the package around it is not there either
        return False
