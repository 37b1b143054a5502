"""s12 on several processes against s11 on one: the same losses, the same norms."""

import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist
from conftest import FLOAT32, figures, step_lines

pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="torch without gloo")

TORCHRUN = ("-m", "torch.distributed.run")
TWO_RANKS = (*TORCHRUN, "--standalone", "--nproc_per_node=2")


RUNS = [("s12", FLOAT32, TWO_RANKS), ("s11", FLOAT32, ()), ("s05", FLOAT32, TWO_RANKS)]


def is_s11(run, stages):
    reference = stages("s11", *FLOAT32)
    assert run.status == reference.status == 0, run.err + reference.err
    for name in ("loss", "norm", "lr"):
        assert figures(run, name) == pytest.approx(figures(reference, name), abs=1e-4, rel=0), name
    assert figures(run, "tokens") == figures(reference, "tokens")


def test_two_ranks_are_one_process_with_all_micro_batches(stages):
    run = stages("s12", *FLOAT32, launch=TWO_RANKS)
    is_s11(run, stages)
    assert run.header["world_size"] == 2 and run.header["accum"] == 4 and run.end["counted"] == 1


def test_rank_0_alone_talks(stages):
    run = stages("s12", *FLOAT32, launch=TWO_RANKS)
    lines = run.out.splitlines()
    assert lines[0].startswith("Stage 12 · ddp") and lines[-1].startswith("median dt")
    assert len(lines) == 3 + len(run.steps) and len(step_lines(run)) == len(run.steps) == 4
    assert len({line.split("|")[0] for line in step_lines(run)}) == 4


def test_two_agents_on_one_machine_are_two_nodes(stages):
    with socket.socket() as probe:  # a free port for the rendezvous
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    meeting = ("--nnodes=2", "--nproc_per_node=1", "--master_addr=127.0.0.1", f"--master_port={port}")
    with ThreadPoolExecutor(2) as pool:
        launches = [(*TORCHRUN, *meeting, f"--node_rank={node}") for node in range(2)]
        first, second = pool.map(lambda launch: stages.now("s12", *FLOAT32, launch=launch), launches)
    is_s11(first, stages)
    assert first.header["world_size"] == 2
    # each node has a rank with LOCAL_RANK 0, but only one of them is rank 0
    assert second.status == 0 and second.out == "" and second.header is None


def test_two_runs_under_plain_python_at_one_time_do_not_collide(stages):
    with ThreadPoolExecutor(2) as pool:
        for run in pool.map(lambda number: stages.now("s12", *FLOAT32, number=number), range(2)):
            is_s11(run, stages)
            assert run.header["world_size"] == 1


def test_a_stage_other_than_s12_is_refused_by_every_rank(stages):
    run = stages("s05", *FLOAT32, launch=TWO_RANKS)
    assert run.status != 0 and run.header is None and step_lines(run) == []
    refusals = [line for line in run.err.splitlines() if "s05_flash" in line and "s12_ddp" in line]
    assert refusals and all("error:" in line for line in refusals)
