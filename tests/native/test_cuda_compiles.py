"""The CUDA bindings where there is no CUDA: they compile, and they meet the schemas and the
launchers.
"""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from megatron_merak.ops.schemas import NORM, POINTWISE, SCHEMAS
from tests.native.shim import ROOT, signatures

CUDA = ROOT / "csrc/cuda"
BINDINGS = sorted(CUDA.glob("ops_*.cpp"))
# Types of a schema -> of the function that implements it.
TYPES = {
    "Tensor": "Tensor",
    "Tensor?": "std::optional<Tensor>",
    "float": "double",
    "int": "int64_t",
    "bool": "bool",
    "str": "std::string",
}


@pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not on PATH")
@pytest.mark.parametrize("binding", BINDINGS, ids=lambda path: path.stem)
def test_bindings_compile(binding):
    """Against the headers of a torch without CUDA: the stable ABI needs no others."""
    include = Path(torch.__file__).parent / "include"
    headers = ["-isystem", str(include), "-isystem", str(include / "torch/csrc/api/include")]
    options = [
        "-std=c++17",
        "-fsyntax-only",
        "-Wall",
        "-Werror",
        "-DUSE_CUDA",
        "-DTORCH_TARGET_VERSION=0x020b000000000000",
    ]
    command = [
        "g++",
        *options,
        *headers,
        "-I",
        str(ROOT / "csrc"),
        "-I",
        str(ROOT / "csrc/include"),
        str(binding),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]


def test_every_part_is_built_by_the_standard_that_is_checked():
    """Not by the default of the torch that is there: C++17 in 2.11, C++20 in 2.13."""
    text = (ROOT / "setup.py").read_text(encoding="utf-8")
    assert re.findall(r"-std=[\w+]+", text) == ["-std=c++17"] and 'STANDARD = "-std=c++17"' in text
    compilers = re.findall(r'extra_compile_args=\[(\w+)|"(?:cxx|nvcc)": \[(\w+)', text)
    assert [a or b for a, b in compilers] == ["STANDARD"] * 4


@pytest.mark.parametrize("binding", BINDINGS, ids=lambda path: path.stem)
def test_bindings_have_the_arguments_of_their_schemas(binding):
    """The compiler does not know the schemas; a wrong type would show on the first call only."""
    text = binding.read_text(encoding="utf-8")
    names = re.findall(r'library\.impl\("(\w+)", TORCH_BOX\(&(\w+)\)\)', text)
    assert names
    for name, function in names:
        found = re.search(rf"\b{function}\(((?:[^()]|\n)*)\)\s*{{", text)[1]
        found = [
            re.sub(r"\bconst\b|&|\s+\w+$", "", part.strip()).strip() for part in found.split(",")
        ]
        arguments = SCHEMAS[name].split("->")[0].strip()[1:-1].split(",")
        expected = [
            TYPES[re.sub(r"\(\w!\)", "", part.strip().rsplit(" ", 1)[0])] for part in arguments
        ]
        assert found == expected, name


def test_every_operation_has_one_binding():
    names = [
        name
        for path in BINDINGS
        for name in re.findall(r'library\.impl\("(\w+)"', path.read_text(encoding="utf-8"))
    ]
    assert len(names) == len(set(names)) and set(names) <= SCHEMAS.keys()
    assert not (NORM | POINTWISE).keys() - set(names)


def test_every_launcher_is_declared_and_defined_once():
    sources = "".join(path.read_text(encoding="utf-8") for path in sorted(CUDA.glob("*.cu")))
    for name in signatures():
        assert (
            len(re.findall(rf"^(?:extern \"C\" )?int(?:64_t)? {name}\(", sources, re.MULTILINE))
            == 1
        ), name
