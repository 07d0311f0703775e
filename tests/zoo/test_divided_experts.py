"""Mixtures of transformers whose experts two replicas divide: losses and gradient norms are those of
two replicas that have all of them."""

import pytest
import torch

from megatron_merak.parallel.mesh import build_mesh
from megatron_merak.plan import Grid
from tests.engines import engine_of, step
from tests.ranks import run_ranks
from tests.zoo.specimen import tiny

# biases of experts; experts that follow from token ids; a view of attention's result
SOME = ("gpt_oss", "deepseek_v4", "afmoe")
OTHERS = """aria_text axk1 axk2 bailing_hybrid beam cohere2_moe deepseek_v2 deepseek_v3 deepseek_v32
    dots1 dots3_note dots3_note_text ernie4_5_moe exaone_moe flex_olmo glm4_moe glm4_moe_lite
    glm_moe_dsa granitemoe granitemoe_swa granitemoehybrid granitemoeshared hy_v3 hy_v4
    inkling2_loop_text inkling2_text inkling_text jamba kimi_linear kolibri1 laguna lara_mini
    lfm2_moe mellum mimo_v2_flash minimax minimax_m2 minimax_m3_vl_text mixtral nemotron_h
    olmoe phimoe qwen2_moe qwen3_5_moe qwen3_5_moe_text qwen3_moe qwen3_next qwen4_exp
    qwen4_exp_text sarvam_mla sarvam_moe solar_open zaya""".split()


def steps(rank, world_size, kind, experts):
    """(loss, gradient norm) of two steps of AdamW."""
    specimen = tiny(kind)
    mesh = build_mesh(Grid(dp=2), rank, torch.device("cpu"), expert_group=experts)
    model = engine_of(
        specimen.model(), specimen.batch(seed=rank), mesh, expert_model_parallel_size=experts
    )
    found = []
    for number in range(2):
        result = step(model, [specimen.batch(seed=2 * number + rank)], 1e-3, 0.0)
        found += [result.loss, result.grad_norm]
    return found


@pytest.mark.parametrize(
    "kind",
    [
        *(pytest.param(kind, marks=pytest.mark.long) for kind in SOME),
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in OTHERS),
    ],
)
def test_replicas_divide_the_experts_of(kind):
    whole, divided = (run_ranks(steps, 2, kind, experts, timeout=150)[0] for experts in (1, 2))
    assert divided == pytest.approx(whole, rel=2e-5)
