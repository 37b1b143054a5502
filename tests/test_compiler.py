"""inductor, torch.compile's compiler, does not know the attention of s04: else s04 and s05 would be one program.

Its passes over the graph of forward and backward put fused attention in the place of some ways to write it. They are
the same on every device, so no GPU is needed to see what they do, and no code is generated.
"""

import math

import pytest
import torch
from conftest import definitions
from functorch.compile import aot_function, default_partition
from torch._dynamo.utils import counters
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.joint_graph import joint_graph_passes
from torch.nn import functional as F

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # inductor's own use of it

B, T, HEADS, HEAD_DIM = 2, 16, 2, 16
C = HEADS * HEAD_DIM
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def attention_without_mask(q, k, v):
    """Attention as inductor knows it: scaled scores, softmax, weighted sum."""
    scores = q @ k.transpose(-2, -1) / math.sqrt(HEAD_DIM)
    return F.softmax(scores, dim=-1) @ v


def attention_with_added_mask(q, k, v):
    """Causal attention as inductor knows it: minus infinity is added to the scores that lie in the future."""
    future = torch.full((1, 1, T, T), -math.inf, dtype=q.dtype).triu(1)
    scores = q @ k.transpose(-2, -1) / math.sqrt(HEAD_DIM) + future
    return F.softmax(scores, dim=-1) @ v


def fusions(attention, dtype):
    """How many times inductor found attention that it knows, between the heads' views as in model.py's Block."""

    def step(qkv):
        q, k, v = qkv.split(C, dim=2)
        q = q.view(B, T, HEADS, HEAD_DIM).transpose(1, 2)
        k = k.view(B, T, HEADS, HEAD_DIM).transpose(1, 2)
        v = v.view(B, T, HEADS, HEAD_DIM).transpose(1, 2)
        return attention(q, k, v).transpose(1, 2).reshape(B, T, C)

    def partition(graph, inputs, **options):
        joint_graph_passes(graph)
        return default_partition(graph, inputs, **options)

    def keep(graph, inputs):
        return graph

    counters.clear()
    table = select_decomp_table()
    traced = aot_function(step, fw_compiler=keep, bw_compiler=keep, partition_fn=partition, decompositions=table)
    traced(torch.randn(B, T, 3 * C, dtype=dtype, requires_grad=True))
    return counters["inductor"]["fuse_attention"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_inductor_does_not_know_the_attention_of_s04(dtype):
    attention = definitions("s04", "attention", torch=torch, math=math, F=F)["attention"]
    assert fusions(attention, dtype) == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("attention", [attention_without_mask, attention_with_added_mask])
def test_inductor_fuses_attention_that_it_knows(attention, dtype):
    assert fusions(attention, dtype) > 0
