"""Heat in a ring of rods, a rod a rank, by a program written for SCR; only the import was changed.

    python examples/scr_app.py --steps 200
    mpirun -n 4 python examples/scr_app.py --steps 200

Kill it whenever you like and start it again: it goes on from its newest checkpoint, and prints the same in the end.
"""

from __future__ import annotations

import argparse
import os
import time

import numpy as np

from everstep.integrations import scr

CELLS = 10_000


def neighbours() -> tuple[object | None, int, int]:
    """MPI's world, this rank and the number of ranks; alone if nobody started several."""
    if "OMPI_COMM_WORLD_SIZE" not in os.environ:
        return None, 0, 1
    from mpi4py import MPI

    return MPI.COMM_WORLD, MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()


def ends(world: object, rods: np.ndarray, rank: int, size: int) -> tuple[float, float]:
    """The temperature just beyond each end: that of the neighbours in the ring."""
    mine = np.array([rods[0], rods[-1]])
    everybody = np.zeros((size, 2))
    if world is None:
        everybody[0] = mine
    else:
        world.Allgather(mine, everybody)
    return float(everybody[rank - 1][1]), float(everybody[(rank + 1) % size][0])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--step-seconds", type=float, default=0.0)
    arguments = parser.parse_args()
    world, rank, size = neighbours()
    scr.init()
    step, rods = 0, np.random.default_rng(rank).random(CELLS)
    if scr.have_restart():
        scr.start_restart()
        with open(scr.route_file(f"rods.{rank}.npz"), "rb") as file:
            saved = np.load(file)
            step, rods = int(saved["step"]), saved["rods"]
        scr.complete_restart()
        if rank == 0:
            print(f"restarted from step {step}", flush=True)
    while step < arguments.steps and not scr.should_exit():
        left, right = ends(world, rods, rank, size)
        padded = np.concatenate([[left], rods, [right]])
        rods = rods + 0.25 * (padded[:-2] - 2 * rods + padded[2:])
        step += 1
        time.sleep(arguments.step_seconds)
        if scr.need_checkpoint():
            scr.start_output(f"step{step:06d}", scr.FLAG_CHECKPOINT)
            with open(scr.route_file(f"rods.{rank}.npz"), "wb") as file:
                np.savez(file, step=step, rods=rods)
            scr.complete_output()
            if rank == 0:
                print(f"step {step}", flush=True)
    scr.finalize()
    print(f"rank {rank}: step {step}, warmth {rods.sum().hex()}", flush=True)


if __name__ == "__main__":
    main()
