"""Makes Accelerate and Trainer shard on CPUs.

Accelerate shards on accelerators only. On CPUs it drops an FSDP plugin, and with it Trainer's
``fsdp=True``, without a word, and trains with DDP. Its code for FSDP2 runs on CPUs all the same.
"""

from __future__ import annotations

from accelerate import DistributedType, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, PartialState
from transformers import Trainer


def use_fsdp_on_cpus(plugin: FullyShardedDataParallelPlugin) -> None:
    """Set the state of an Accelerator to what it would be on accelerators."""
    assert PartialState().distributed_type == DistributedType.MULTI_CPU  # or this is not needed
    AcceleratorState._shared_state["fsdp_plugin"] = plugin
    for state in (AcceleratorState, PartialState):
        state._shared_state["distributed_type"] = DistributedType.FSDP


class TrainerOnCPUs(Trainer):
    """A Trainer whose ``fsdp=True`` means FSDP2 on CPUs too."""

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        use_fsdp_on_cpus(FullyShardedDataParallelPlugin(**self.args.fsdp_plugin_args))
        self.is_fsdp_enabled = True
