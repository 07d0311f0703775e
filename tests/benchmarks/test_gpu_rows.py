"""Training steps on a GPU, tried on a CPU: what is counted, how kernels are sorted, what a page
says of them.
"""

import importlib
import io
import json
import subprocess
import sys
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from megatron_merak.arguments import build_parser, read
from megatron_merak.config import Config
from megatron_merak.planner.cost import model_flops

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "benchmarks"))

gpu_rows, gpu_trace, gpu_worker = map(
    importlib.import_module, ("gpu_rows", "gpu_trace", "gpu_worker")
)
gpu_page, gpu_steps = map(importlib.import_module, ("gpu_page", "gpu_steps"))


@pytest.mark.parametrize("name", gpu_rows.SHAPES)
def test_parameters_are_those_of_the_model(name):
    shape = gpu_rows.SHAPES[name]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(gpu_worker.hf_config(shape, 4096))
        assert sum(p.numel() for p in model.parameters()) == shape.parameters - shape.adapters
    adapted = gpu_worker.hf_model(gpu_rows.tiny(shape), 64, torch.device("cpu"))
    trained = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    assert trained == (gpu_rows.tiny(shape).adapters or gpu_rows.tiny(shape).parameters)


@pytest.mark.parametrize("name", ["1.7b", "7b", "8b"])
def test_flops_are_those_that_training_reports(name):
    shape = gpu_rows.SHAPES[name]
    flags = gpu_worker.gpt_flags(shape, 4096) + gpu_worker.training_flags(shape, 4096, 8, 1)
    config, _ = read(build_parser("", Config), flags, Config)
    # the tokenizer of made-up data adds one to the vocabulary
    model = replace(config.model, vocab_size=config.model.vocab_size + 1)
    assert shape.flops(8 * 4096, 4096) == model_flops(model, 8)
    scores = shape.flops(1, 4096, all_scores=True) - shape.flops(1, 4096)
    assert scores == 6 * shape.layers * shape.hidden * 4096


def test_frozen_weights_have_no_gradient_and_no_state():
    lora, plain = gpu_rows.SHAPES["8b-lora"], gpu_rows.SHAPES["8b"]
    assert lora.adapters == 32 * 16 * (4096 + 4096 + 4096 + 1024)
    assert lora.state_bytes == 2 * plain.parameters + 18 * lora.adapters
    products = plain.flops(1, 0) // 6
    assert lora.flops(1, 0) == 4 * products + 6 * lora.adapters


KERNELS = {
    "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_3x64x128x128_4x1x1_cga1x1x1": "attention",
    "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd_kernel_traits<128>>": "attention",
    "fmha_cutlassF_bf16_aligned_64x128_rf_sm80(PyTorchMemEffAttention::AttentionKernel)": "attention",
    "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NTT": "products",
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_cublas": "products",
    "void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_16x16_128x2_tn_align8>": "products",
    "void at::native::elementwise_kernel<at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)>": "copies",
    "Memcpy DtoD (Device -> Device)": "copies",
    "void at::native::(anonymous namespace)::CatArrayBatchedCopy<at::native::OpaqueType<2u>, 4>": "copies",
    "void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor<float>>": "optimizer",
    "void merak::adamw<float, __nv_bfloat16>(float*)": "optimizer",
    "void merak::forward<__nv_bfloat16, true>(merak::NormForward)": "norms and pointwise",
    "void at::native::vectorized_elementwise_kernel<4, CUDAFunctor_add<c10::BFloat16>>": "norms and pointwise",
    "triton_poi_fused_add_mul_silu_3": "norms and pointwise",
    "ncclDevKernel_AllReduce_Sum_bf16_RING_LL": "other",
    "aten::addmm": "products",
    "aten::add_": "norms and pointwise",
}


@pytest.mark.parametrize("name", KERNELS)
def test_classes_of_kernels(name):
    assert gpu_trace.class_of(name) == KERNELS[name]


def _event(cat, name, ts, dur, tid=1):
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "tid": tid}


def test_a_gpus_step_by_class_and_its_gaps():
    """Copies on another stream run beside a product; nothing runs from 15 to 20 and from
    30 to 50.
    """
    events = [_event("kernel", "nvjet_a", 0, 10), _event("gpu_memcpy", "Memcpy HtoD", 5, 10, tid=2)]
    events += [_event("kernel", "nvjet_a", 20, 10), _event("kernel", "flash_fwd", 50, 1000)]
    found = gpu_trace.breakdown(
        {"traceEvents": [*events, _event("cuda_runtime", "launch", 0, 99)]}, "cuda"
    )
    assert found["class_ms"] == {
        "attention": 1.0, "optimizer": 0.0, "copies": 0.01, "products": 0.02, "norms and pointwise": 0.0, "other": 0.0
    }  # fmt: skip
    assert (found["span_ms"], found["kernels"], found["gaps"]) == (1.05, 4, 2)
    assert found["idle_ms"] == 0.025 and found["gaps_over_10us_ms"] == 0.02
    assert found["attention_kernels"] == ["flash_fwd"] and found["longest"][0]["calls"] == 1
    assert "problem" in gpu_trace.breakdown({"traceEvents": []}, "cuda")


def test_a_cpus_operations_count_without_what_they_called():
    events = [_event("cpu_op", "aten::linear", 0, 10), _event("cpu_op", "aten::addmm", 2, 6)]
    events += [_event("cpu_op", "aten::copy_", 3, 2), _event("cpu_op", "aten::add", 20, 4)]
    found = gpu_trace.breakdown({"traceEvents": events}, "cpu")
    assert found["class_ms"]["products"] == pytest.approx(8e-3) and found["class_ms"][
        "copies"
    ] == pytest.approx(2e-3)
    assert found["idle_ms"] == pytest.approx(1e-2)


def test_a_part_stands_in_for_a_model_that_does_not_fit():
    row = gpu_rows.row_of("7b gpt 8")
    assert gpu_rows.that_fits(row, 160_000_000_000) == gpu_rows.that_fits(row, None) == row
    assert gpu_rows.that_fits(row, 80_000_000_000).name == "7b-12 gpt 8"
    for name in ("7b gpt", "9b gpt 8", "7b nobody 8", "7b gpt many"):
        with pytest.raises(ValueError, match="it is no row"):
            gpu_rows.row_of(name)


def test_every_row_of_a_session_is_one():
    rows = [step.name for step in gpu_steps.STEPS if step.command[0].endswith("gpu_worker.py")]
    assert len(rows) >= 10 and all(gpu_rows.row_of(name).name == name for name in rows)


def packed(folder, name, rows, **head):
    """A session.tgz."""
    lines = [
        {"date": "2026-01-02", "part": 1, "budget": 600, "seconds": 500.0, "kit": "kit for it"}
        | head,
        *rows,
    ]
    content = "".join(json.dumps(line) + "\n" for line in lines).encode()
    with tarfile.open(folder / name, "w:gz") as archive:
        one = tarfile.TarInfo("results.jsonl")
        one.size = len(content)
        archive.addfile(one, io.BytesIO(content))
    return str(folder / name)


def test_a_row_is_measured_and_goes_into_a_page(tmp_path):
    into = tmp_path / "row.json"
    command = [sys.executable, "benchmarks/gpu_worker.py", "7b gpt 1", "--into", str(into)]
    done = subprocess.run(
        [*command, "--device", "cpu", "--steps", "1"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(into.read_text())
    assert (
        len(found["seconds"]) == 1 and len(found["losses"]) == 4 and found["figure"] in done.stdout
    )
    assert found["tokens_per_s"] == pytest.approx(64 / found["seconds"][0])
    assert found["profile"]["class_ms"]["products"] > 0 and torch.__version__.startswith(
        found["versions"]["torch"]
    )

    page = tmp_path / "page.md"
    page.write_text(f"Above.\n{gpu_page.BEGIN}\nold\n{gpu_page.END}\nBelow.\n")
    row = {
        "step": "7b gpt 1",
        "status": "ok",
        "seconds": 30.0,
        "figure": "fast",
        "result": found,
    }
    session = packed(tmp_path, "cpu.tgz", [row])
    assert gpu_page.main([session, "--into", str(page)]) == 2 and "old" in page.read_text()

    card = {"name": "NVIDIA H200", "clocks.sm": "1980 MHz"}
    start = {"device": "NVIDIA H200", "card": card, "versions": {"torch": "2.11.0"}}
    on_gpu = found | {"device": "NVIDIA H200", "card": card, "mfu": 0.5}
    rows = [
        {"step": "start", "status": "ok", "seconds": 5.0, "figure": "card", "result": start},
        row | {"result": on_gpu},
        {"step": "kernels", "status": "cut", "seconds": 0.0, "figure": ""},
    ]
    sessions = [
        packed(tmp_path, "one.tgz", rows),
        packed(tmp_path, "two.tgz", rows[:1], part=2, date="2026-01-03"),
    ]
    assert gpu_page.main([*sessions, "--into", str(page)]) == 0
    text = page.read_text()
    assert "| Llama-2-7B | pretrain_gpt.py, 1 |" in text and "50.0%" in text and "old" not in text
    assert (
        "### NVIDIA H200, 2026-01-02, part 1" in text
        and "clocks.sm 1980 MHz" in text
        and "torch 2.11.0" in text
    )
    assert text.index("2026-01-03, part 2") < text.index("2026-01-02, part 1")
    assert "| kernels | cut | 0 |  |" in text and text.endswith("Below.\n")
    assert gpu_page.main([str(page)]) == 2


def test_other_losses_are_told():
    rows = [
        {
            "row": f"7b {way} 8",
            "model": "7b",
            "contestant": way,
            "micro_batches": 8,
            "losses": [loss],
        }
        for way, loss in (("trainer", 10.0), ("hf", 10.1), ("hf-compile", 10.5), ("gpt", 7.0))
    ]
    assert gpu_page.disagreements(rows) == [
        "7b hf-compile 8: first loss 10.5000, 7b trainer 8 has 10.0000"
    ]
