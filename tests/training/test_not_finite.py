"""Where the numbers of a step stop being finite is said by the name of the first module of the
forward.
"""

import pytest
import torch

from megatron_merak.errors import NumericsError
from megatron_merak.hf_trainer.arguments.merak_arguments import MerakArguments
from megatron_merak.hf_trainer.trainer import MerakTrainer
from megatron_merak.stages.gpt_model import GPTModel
from tests.hf_trainer.stand_in import collate, samples, tiny_llama
from tests.ranks import RankFailure, run_ranks
from tests.training.jobs import job


def _overflowing(rank, world, flags, parameter):
    """A job in which a weight grows so large that its products overflow."""
    backward = GPTModel.backward

    def spoiled(self, batches):
        if parameter in self.buffer.slots:
            self.buffer.parameter(parameter).fill_(3e38)
        return backward(self, batches)

    GPTModel.backward = spoiled
    return job(rank, world, flags)


def test_a_job_names_the_module_on_its_stage():
    flags = "--train-iters 9 --pipeline-model-parallel-size 2 --max-consecutive-skipped-steps 2"
    with pytest.raises(RankFailure) as caught:
        run_ranks(_overflowing, 2, flags, "transformer.h.1.mlp.c_fc.weight")
    message = str(caught.value.__cause__)
    assert isinstance(caught.value.__cause__, NumericsError)
    assert (
        "the output of transformer.h.1.mlp.c_fc on rank 1 is the first that is not finite"
        in message
    )


def test_a_captured_model_names_the_module_of_the_user(tmp_path, caplog):
    model = tiny_llama()
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.fill_(3e38)
    settings = {
        "max_steps": 3,
        "max_consecutive_skipped_steps": 2,
        "report_to": "none",
        "use_cpu": True,
    }
    trainer = MerakTrainer(model, MerakArguments(str(tmp_path), **settings), collate, samples(32))
    with pytest.raises(
        NumericsError, match=r"the output of model\.layers\.1\.mlp\S* on rank 0 is the first"
    ):
        trainer.train()
    told = [
        record.getMessage() for record in caplog.records if record.name.startswith("megatron_merak")
    ]
    assert any(
        "Step 1: the step was skipped: the output of model.layers.1.mlp" in text for text in told
    )
