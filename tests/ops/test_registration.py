"""Every operation of the table as PyTorch sees it: schemas, fake tensors, gradients, exports,
compilation.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from megatron_merak import ops
from megatron_merak.ops.schemas import COMPOSED, SCHEMAS
from tests.ops.truth import TYPES, random

ROOT = Path(__file__).resolve().parents[2]
SOURCES = [*(ROOT / "csrc" / "cpu").glob("*.cpp"), *(ROOT / "csrc" / "cuda").glob("*.cpp")]
EPS = 1e-5


def arguments(dtype: torch.dtype = torch.float32) -> dict[str, list[tuple]]:
    """For every operation some calls, with and without what is optional, of fresh tensors of
    ``dtype``.
    """
    x, y, z, wide = random((2, 3, 8), (2, 3, 8), (2, 3, 8), (2, 3, 16), dtype=dtype)
    weight, bias = random((8,), (8,), dtype=dtype)
    rstd, mean = torch.rand(2, 3) + 0.5, torch.rand(2, 3)
    seed, (cos, sin) = torch.tensor([5]), ops.rotary_angles(2, 6, 100.0)
    logits, target = random((5, 12), dtype=dtype)[0], torch.tensor([0, 3, 9, 4, 11])
    wide_type = torch.promote_types(dtype, torch.float32)
    stats, of_stats, smooth, of_smooth = (torch.rand(5, n, dtype=wide_type) for n in (3, 3, 5, 5))
    scores, probabilities = random((2, 4, 3, 6), dtype=dtype)[0], torch.rand(2, 4, 3, 6).to(dtype)
    flat = [torch.rand(70) for _ in range(4)]
    rows, columns = random((6, 8), (6, 4), dtype=dtype)
    ends = torch.tensor([2, 2, 6])
    return {
        "rms_norm": [(x, weight, EPS)],
        "rms_norm_backward": [(x, y, weight, rstd)],
        "layer_norm": [(x, weight, bias, EPS)],
        "layer_norm_backward": [(x, y, weight, mean, rstd)],
        "add_rms_norm": [(x, y, weight, EPS)],
        "add_rms_norm_backward": [(x, y, z, weight, rstd), (x, None, z, weight, rstd)],
        "add_layer_norm": [(x, y, weight, bias, EPS)],
        "add_layer_norm_backward": [
            (x, y, z, weight, mean, rstd),
            (x, None, z, weight, mean, rstd),
        ],
        "gated": [(x, y, "silu"), (x.transpose(0, 1), y.transpose(0, 1), "gelu")],
        "gated_backward": [(x, y, z, "gelu_tanh")],
        "gated_merged": [(wide, "silu")],
        "gated_merged_backward": [(x, wide, "silu")],
        "bias_gelu": [(x, bias, "gelu_tanh"), (x, None, "gelu")],
        "bias_gelu_backward": [(x, y, bias, "gelu"), (x, y, None, "gelu_tanh")],
        "bias_dropout_add": [
            (x, bias, y, 0.5, seed),
            (x, None, None, 0.5, seed),
            (x, bias, y, 0.0, None),
        ],
        "bias_dropout_add_backward": [
            (x, 0.5, seed, True),
            (x, 0.5, seed, False),
            (x, 0.0, None, True),
        ],
        "rotary": [
            (
                wide.view(2, 3, 2, 8).transpose(1, 2),
                *(t.squeeze(1)[:, None] for t in (cos, sin)),
                True,
                False,
            )
        ],
        "rotary_": [
            (
                wide[..., 8:].unflatten(-1, (2, 4)),
                x.view(2, 3, 2, 4),
                torch.rand(3, 1, 2),
                torch.rand(3, 1, 2),
                False,
                True,
            )
        ],
        "masked_softmax": [(scores, scores[:1, :1] > 0, 0.5, True), (scores, None, 0.5, False)],
        "masked_softmax_backward": [(scores, probabilities, 0.5, True)],
        "exponentiate_": [(logits, target, 12)],
        "cross_entropy_stats": [(logits, target, 0, 12, False), (logits, target, 4, 10, True)],
        "cross_entropy_grad": [
            (logits, target, stats, of_stats, 0, 12),
            (logits, target, smooth, of_smooth, 4, 10),
        ],
        "cross_entropy_grad_": [(logits, target, stats, of_stats, 0, 12)],
        "adamw_": [(*flat, torch.rand(70).to(dtype), 0.1, 0.9, 0.99, 1e-8, 0.1, 2, 0.5)],
        "sum_of_squares": [(x,)],
        "accumulate_": [(torch.rand(2, 3, 8), x, 0.5)],
        "cast_": [(x, torch.rand(2, 3, 8), 0.5)],
        "add_rows_": [(torch.rand(12, 8), torch.tensor([3, 3, 1]), x[0])],
        "product_by_group": [
            (rows, torch.rand(3, 8, 4).to(dtype), ends),
            (rows, torch.rand(3, 4, 8).to(dtype).mT, ends.int() - 1),
        ],
        "add_products_": [
            (torch.rand(3, 8, 4, dtype=wide_type), rows, columns, ends, False),
            (torch.rand(3, 4, 8, dtype=wide_type), columns, rows, ends.int(), True),
        ],
        "sums_of_rows": [(torch.rand(6, 8).to(dtype), torch.tensor([3, 0, 1, 5]), 2)],
    }


def calls(dtype: torch.dtype = torch.float32):
    return [
        (name, place) for name, given in arguments(dtype).items() for place in range(len(given))
    ]


def differentiable(name: str) -> bool:
    return (
        not name.endswith("_")
        and f"{name}_backward" in SCHEMAS
        or name in ("rotary", "cross_entropy_stats")
    )


def with_gradients(name: str, given: tuple) -> tuple:
    """The floating tensors but tables and statistics ask for gradients, where the operation has
    some.
    """
    if not differentiable(name):
        return given
    wanted = given[:1] if name == "rotary" else given
    asked = [
        x.requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() else x for x in wanted
    ]
    return (*asked, *given[len(asked) :])


def test_the_table_and_these_calls_name_the_same_operations():
    assert set(arguments()) == set(SCHEMAS | COMPOSED)
    for name, schema in (SCHEMAS | COMPOSED).items():
        assert str(getattr(torch.ops.merak, name).default._schema).startswith(f"merak::{name}(")
        assert schema.count("->") == 1


@pytest.mark.parametrize(("name", "place"), calls(), ids=str)
def test_an_operation_is_what_it_says(name, place):
    """Aliases, mutations, shapes and strides of fake tensors, and gradients through
    ``torch.compile``'s tracing.
    """
    torch.library.opcheck(
        getattr(torch.ops.merak, name).default,
        with_gradients(name, arguments()[name][place]),
        atol=1e-5,
        rtol=1e-5,
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("name", "place"), calls(), ids=str)
def test_a_twin_is_what_it_says(name, place, dtype):
    given = with_gradients(name, arguments(dtype)[name][place])
    utils = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(getattr(torch.ops.merak_torch, name).default, given, test_utils=utils)


def is_compiled(name: str, key: str = "CPU") -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"merak::{name}", key)


def test_the_library_implements_the_whole_table():
    if ops.PROBLEMS["_ops_cpu"]:
        pytest.skip(ops.PROBLEMS["_ops_cpu"])
    assert [name for name in SCHEMAS if not is_compiled(name)] == []
    assert not any(map(is_compiled, COMPOSED))
    assert not any(
        torch._C._dispatch_has_kernel_for_dispatch_key(f"merak_torch::{name}", "CPU")
        for name in SCHEMAS
    )


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("name", "place"), calls(), ids=str)
def test_kernels_give_the_shapes_types_and_strides_of_fake_tensors(name, place, dtype):
    given = arguments(dtype)[name][place]
    with torch._subclasses.FakeTensorMode() as mode:
        imagined = getattr(torch.ops.merak, name)(
            *(mode.from_tensor(x) if isinstance(x, Tensor) else x for x in given)
        )
    found = getattr(torch.ops.merak, name)(*given)
    for ours, fake in zip(flat(found), flat(imagined), strict=True):
        assert (ours.shape, ours.dtype, ours.stride()) == (fake.shape, fake.dtype, fake.stride())


def flat(results) -> list[Tensor]:
    return [results] if isinstance(results, Tensor) else list(results or ())


# ---- the C++ side --------------------------------------------------------------------------------
_CPP = {"Tensor": "Tensor", "Tensor?": "std::optional<Tensor>", "str": "std::string"}
_CPP |= {"float": "double", "int": "int64_t", "bool": "bool"}


def types_of_schema(schema: str) -> list[str]:
    listed = re.sub(r"\([a-z]!\)", "", schema)
    return [_CPP[each.split()[0]] for each in listed[1 : listed.index(") ->")].split(", ")]


def functions(source: str) -> dict[str, str]:
    """Operation -> the function that is registered for it."""
    return dict(re.findall(r'impl\("(\w+)",\s*TORCH_BOX\(&(?:\w+::)*(\w+)\)\)', source))


def types_of_function(name: str, source: str) -> list[str]:
    aliases = dict(re.findall(r"using (\w+) = (std::optional<[\w:]+>);", source))
    (listed,) = re.findall(rf"^[\w:<>, ]+ {name}\(([^()]*)\)\s*{{", source, re.MULTILINE)
    found = []
    for each in re.split(r",(?![^<]*>)", listed):
        kind = re.sub(r"\bconst\b|&", "", each).split()[0]
        found.append(aliases.get(kind, kind).replace("torch::stable::", ""))
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_arguments_have_the_types_of_the_table(path):
    """The stable ABI hands over 64-bit words and does not check what they are taken for."""
    source = path.read_text(encoding="utf-8")
    for operation, function in functions(source).items():
        assert types_of_function(function, source) == types_of_schema(SCHEMAS[operation]), operation


def test_a_wrong_type_would_be_seen():
    source = "using Maybe = std::optional<Tensor>;\n"
    source += "Tensor f(const Tensor& a, const Maybe& b, int64_t c, std::string d) {"
    assert types_of_function("f", source) == types_of_schema(
        "(Tensor(a!) a, Tensor? b, int c, str d) -> Tensor"
    )
    assert types_of_function("f", source) != types_of_schema(
        "(Tensor a, Tensor? b, float c, str d) -> Tensor"
    )
    assert functions('library.impl("g_", TORCH_BOX(&cpu::f));') == {"g_": "f"}


# ---- graphs --------------------------------------------------------------------------------------
class Block(nn.Module):
    """One of every face that a model calls, on [2, 3, 8]."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.rand(8) + 0.5), nn.Parameter(torch.rand(8))
        cos, sin = ops.rotary_angles(3, 4, 100.0)
        self.register_buffer("cos", cos)
        self.register_buffer("sin", sin)

    def forward(self, x: Tensor) -> Tensor:
        y, total = ops.add_rms_norm(ops.rms_norm(x, self.weight, EPS), x, self.weight, EPS)
        z, total = ops.add_layer_norm(
            ops.layer_norm(y, self.weight, self.bias, EPS), total, self.weight, self.bias, EPS
        )
        z = ops.rotary(z.unflatten(-1, (2, 4)), self.cos, self.sin).flatten(-2)
        z = ops.gated(z, ops.bias_gelu(z, self.bias), "silu") + ops.swiglu(
            torch.cat((z, total), -1)
        )
        return ops.bias_dropout_add(z, self.bias, total, 0.1, self.training)


NODES = (
    "rms_norm",
    "layer_norm",
    "add_rms_norm",
    "add_layer_norm",
    "rotary",
    "gated",
    "bias_gelu",
    "gated_merged",
)
NODES += ("bias_dropout_add",)


def test_exports_name_the_operations():
    graph = torch.export.export(Block(), (torch.randn(2, 3, 8),)).graph
    called = {node.target for node in graph.nodes if node.op == "call_function"}
    assert {getattr(torch.ops.merak, name).default for name in NODES} <= called


def test_compilation_has_no_graph_break_and_the_same_gradients():
    torch.manual_seed(0)
    block, (x,) = Block().eval(), random((2, 3, 8))
    seen = []

    def note(module, _):
        seen.extend(str(node.target).removesuffix(".default") for node in module.graph.nodes)
        return module

    torch._dynamo.reset()
    torch.compile(block, fullgraph=True, backend=note)(x)
    assert {f"merak.{name}" for name in NODES} <= set(seen)
    results = []
    for each in (block, torch.compile(block, fullgraph=True, backend="aot_eager")):
        given = x.clone().requires_grad_()
        out = each(given)
        results.append(
            (out, *torch.autograd.grad(out.square().sum(), (given, *block.parameters())))
        )
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("dtype", TYPES)
def test_gradients_are_dense_and_of_their_tensors_type(dtype):
    torch.manual_seed(0)
    block, (x,) = Block().to(dtype), random((3, 2, 8), dtype=dtype)
    x = x.transpose(0, 1).detach().requires_grad_()
    upstream = random((8, 2, 3), dtype=dtype)[0].permute(1, 2, 0)
    for given, grad in zip(
        (x, block.weight), torch.autograd.grad(block(x), (x, block.weight), upstream), strict=True
    ):
        assert grad.dtype == dtype and grad.shape == given.shape and grad.is_contiguous()


def test_kernels_can_be_turned_off():
    """In a process of its own: operations are registered once."""
    code = (
        "import torch, warnings; warnings.simplefilter('error'); from megatron_merak import ops\n"
        "assert ops.PROBLEMS['_ops_cpu'] == 'MERAK_EXT=0', ops.PROBLEMS\n"
        "assert not torch._C._dispatch_has_kernel_for_dispatch_key('merak::rms_norm', 'CPU')\n"
        "x = torch.randn(3, 8)\n"
        "assert torch.equal(ops.swiglu(x), torch.ops.merak_torch.gated_merged(x, 'silu'))"
    )
    environment = {"MERAK_EXT": "0", "PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
