"""What vLLM's build for CPUs lacks for experts on several ranks: the exchange of tokens, and local numbers of experts.

Each of vLLM's workers imports this module with `--worker-extension-cls tests.with_vllm.experts_on_cpu.Extension`.
"""

import functools

import torch
from torch.nn.functional import pad
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts


class Extension:
    """Adds nothing to a worker."""


def all_gatherv(self, input_, dim=0, sizes=None):
    """Concatenate the tensors of all ranks; `sizes`: number of rows of each."""
    assert dim == 0
    if isinstance(input_, list):
        return [all_gatherv(self, each, dim, sizes) for each in input_]
    padding = [0, 0] * (input_.dim() - 1) + [0, max(sizes) - len(input_)]
    padded = pad(input_, padding).contiguous()
    parts = [torch.empty_like(padded) for _ in sizes]
    torch.distributed.all_gather(parts, padded, group=self.device_group)
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


def reduce_scatterv(self, input_, dim=-1, sizes=None):
    """Add the tensors of all ranks; return the rows of this rank."""
    assert dim == 0
    total = input_.contiguous().clone()
    torch.distributed.all_reduce(total, group=self.device_group)
    return total.split(sizes)[self.rank_in_group].contiguous()


def with_local_experts(apply):
    """Make the experts of other ranks add nothing."""

    @functools.wraps(apply)
    def apply_local(self, *, topk_weights, topk_ids, expert_map, **others):
        if expert_map is not None:
            local = expert_map[topk_ids.long()]
            topk_weights = topk_weights.masked_fill(local < 0, 0.0)
            topk_ids = local.clamp(min=0).to(topk_ids.dtype)
        return apply(
            self, topk_weights=topk_weights, topk_ids=topk_ids, expert_map=expert_map, **others
        )

    return apply_local


CpuCommunicator.all_gatherv = all_gatherv
CpuCommunicator.reduce_scatterv = reduce_scatterv
CPUUnquantizedExperts.apply = with_local_experts(CPUUnquantizedExperts.apply)
