"""Which process of a run this is, if torchrun or another launcher started several, by the environment."""

import os

from .common import refuse

RANK_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # torchrun sets all four
NUMBERS_OF_TASKS = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")  # of srun and of mpirun


def world_size():
    """Return how many processes a launcher started for this run; 1 without one."""
    return int(os.environ.get("WORLD_SIZE") or "1")


def is_rank_0():
    """Return whether this is the one process of a run that prints and writes."""
    return world_size() == 1 or os.environ["RANK"] == "0"


def check_ranks():
    """Exit with one line if several processes were started but can't find one another."""
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_PORT", *NUMBERS_OF_TASKS):
        if not (os.environ.get(name) or "1").isdecimal():
            refuse(f"{name} is {os.environ[name]!r} in the environment, not a number: unset it, or use torchrun")
    missing = [name for name in RANK_VARIABLES if not os.environ.get(name)]
    if world_size() != 1 and missing:
        refuse(f"WORLD_SIZE is {world_size()} in the environment, without {missing[0]}: unset it, or use torchrun")
    if world_size() != 1 and int(os.environ["RANK"]) >= world_size():
        refuse(f"RANK is {os.environ['RANK']} and WORLD_SIZE {world_size()} in the environment: use torchrun")
    for name in NUMBERS_OF_TASKS:
        if int(os.environ.get(name) or "1") > 1 and not os.environ.get("WORLD_SIZE"):
            refuse(f"{name} is {os.environ[name]}, and each task would train alone: let one task start torchrun")


def drop_ranks_if_alone():
    """Remove torchrun's variables that a cluster left over, if this is the only process of its run."""
    if world_size() == 1:
        for name in (*RANK_VARIABLES, "LOCAL_RANK"):
            os.environ.pop(name, None)


def set_ranks_if_alone():
    """Let torch.distributed make a process group of this process alone, if no launcher started several."""
    if world_size() == 1:
        os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)  # with it a process would wait for torchrun
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}
        os.environ["MASTER_PORT"] = "0"  # any free one
