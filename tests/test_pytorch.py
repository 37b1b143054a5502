"""The private names that watch.py needs are there in the installed PyTorch, and do what they are for.

Those of `-m`, of DataLoaders, TorchScript and saved tensors are tried by scripts: test_watch.py and test_guard.py.
"""

from harness.watch import pytorch

import threading

import torch
from torch import nn


def test_a_module_is_compiled_by_either_way():
    plain, in_place, wrapped, of_pytorch = (nn.Sequential(nn.Linear(3, 1)) for _ in range(4))
    in_place.compile(backend="eager")
    wrapped = torch.compile(wrapped, backend="eager")
    pytorch.compile_around(of_pytorch)
    assert [pytorch.is_compiled(each) for each in (plain, in_place, wrapped, of_pytorch)] == [False, True, True, True]


def test_the_compiler_counts_its_graphs_and_has_a_lock_and_a_flag():
    with torch._dynamo.config.patch(suppress_errors=False):
        pytorch.let_compiler_fail()
        assert torch._dynamo.config.suppress_errors
    before = pytorch.compiled_graphs()
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(3))
    assert pytorch.compiled_graphs() == before + 1
    assert type(pytorch.lock_of_compiler()) is type(threading.RLock())


def test_a_function_that_the_compiler_skips_calls_one_that_it_compiles():
    graphs = []

    def inner(x):
        return x + 1

    def outer(x):
        return inner(x)

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    pytorch.skip_in_compiler(outer)
    torch.compile(outer, backend=backend)(torch.ones(3))
    assert len(graphs) == 1


def test_a_backward_and_a_profiler_are_seen_only_while_they_run():
    seen = []
    x = torch.ones(3, requires_grad=True)
    x.register_hook(lambda gradient: seen.append(pytorch.backward_that_runs() != -1))
    nodes = pytorch.nodes_made()
    x.square().sum().backward()
    assert pytorch.nodes_made() == nodes + 2
    assert seen == [True] and pytorch.backward_that_runs() == -1
    with torch.profiler.profile():
        assert pytorch.is_profiled()
    assert not pytorch.is_profiled()


def test_a_tensor_counts_its_changes_but_not_in_inference_mode():
    x = torch.ones(3)
    x += 1
    assert pytorch.version_of(x) == 1
    with torch.inference_mode():
        assert pytorch.version_of(torch.ones(3)) == 0


def test_vmap_hides_a_dimension():
    hidden = []
    torch.func.vmap(torch.func.grad(lambda x: hidden.append(pytorch.hides_a_dimension(x)) or x.sum()))(torch.ones(2, 3))
    assert hidden == [True] and not pytorch.hides_a_dimension(torch.ones(3))


def test_an_autocast_may_do_nothing():
    assert pytorch.autocast_is_enabled(torch.autocast("cpu"))
    assert not pytorch.autocast_is_enabled(torch.autocast("cpu", enabled=False))


def test_one_more_is_in_machine():
    assert torch.cpu._is_avx512_bf16_supported() in (True, False)
