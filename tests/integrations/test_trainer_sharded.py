"""Hugging Face's Trainer with FSDP2 on two processes: the norms of one process, and a resumed run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from processes import run

pytest.importorskip("transformers")

from small_llama import make_model, trainer

from normcontrol import linear

CPU = {"ACCELERATE_USE_CPU": "true", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
SIX = {"max_steps": 6, "save_steps": 3, "logging_steps": 1}


def norms(out: Path | str, resume: bool = False, sharded: bool = False, **more: Any) -> list[float]:
    """Train six steps of four rows, or resume after three. Returns the logged norms of all steps."""
    more = {**SIX, **more, "per_device_train_batch_size": 2 if sharded else 4}
    made = trainer(out, settings={"ratio": linear(1, 1.5, steps=4), "rate": 0.5}, **more)
    made.train(resume_from_checkpoint=os.path.join(out, "checkpoint-3") if resume else None)
    assert (type(made.model.lm_head.weight.data).__name__ == "DTensor") == sharded
    return [entry["norm/global"] for entry in made.state.log_history if "loss" in entry]


def sharded_by_accelerate(out: str, resume: bool, state_dict_type: str, tied: bool) -> list[float]:
    from fsdp_on_cpus import TrainerOnCPUs

    return norms(
        out,
        resume,
        sharded=True,
        model=make_model(tie_word_embeddings=tied),
        kind=TrainerOnCPUs,
        fsdp=True,
        fsdp_config={"version": 2, "state_dict_type": state_dict_type},
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("state_dict_type", "tied"), [("FULL_STATE_DICT", False), ("SHARDED_STATE_DICT", True)]
)
def test_fsdp_gives_the_norms_of_one_process_and_resumes(state_dict_type, tied, tmp_path):
    one = norms(tmp_path / "one", model=make_model(tie_word_embeddings=tied))
    given = (state_dict_type, tied)
    whole, other = run(sharded_by_accelerate, 2, str(tmp_path / "two"), False, *given, **CPU)
    assert whole == other == pytest.approx(one, rel=1e-5)
    assert len(whole) == 6
    assert run(sharded_by_accelerate, 2, str(tmp_path / "two"), True, *given, **CPU)[0] == whole


def sharded_by_transformers(start: str, out: str) -> list[float]:
    from transformers import LlamaForCausalLM
    from transformers.distributed import DistributedConfig

    model = LlamaForCausalLM.from_pretrained(
        start, distributed_config=DistributedConfig(fsdp_size=2)
    )
    return norms(out, sharded=True, model=model, save_strategy="no")


@pytest.mark.slow
def test_a_model_that_is_sharded_when_it_is_loaded_has_the_norms_of_one_process(tmp_path):
    make_model().save_pretrained(tmp_path / "start")
    one = norms(tmp_path / "one")
    two = run(sharded_by_transformers, 2, str(tmp_path / "start"), str(tmp_path / "two"), **CPU)
    assert two[0] == two[1] == pytest.approx(one, rel=1e-5)
