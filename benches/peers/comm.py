"""Times of NCCL's collectives, and of all-reduce followed by a compiled norm, on the GPUs of one host.

    python3 benches/peers/comm.py --ranks 4 > nccl.csv

A process for each GPU. A time is the median over passes, each of one CUDA graph of calls between two events, of the slowest rank. What is measured
is compared first with sums that are exact in bf16. `cargo bench -p hk-comm` measures this library's at the same sizes.
"""

import argparse
import statistics

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

CALLS, PASSES = 20, 12
SIZES = [1 << shift for shift in range(10, 31, 2)]
ROWS, COLS = (1, 16, 128, 512, 2048), 8192


def measured(call):
    """Microseconds a call."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    times = []
    for _ in range(PASSES):
        dist.barrier()
        torch.cuda.synchronize()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        events[0].record()
        graph.replay()
        events[1].record()
        torch.cuda.synchronize()
        times.append(events[0].elapsed_time(events[1]) * 1e3 / CALLS)
    slowest = torch.tensor([statistics.median(times)], device="cuda")
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return slowest.item()


def check(rank, world):
    x = torch.arange(1 << 16, device="cuda").remainder(17).add(rank).bfloat16()
    want = sum(torch.arange(1 << 16, device="cuda").remainder(17).add(r).bfloat16().float() for r in range(world))
    dist.all_reduce(x)
    assert torch.equal(x.float(), want), "sums of integers are exact"


@torch.compile
def norm(x, residual, weight):
    total = x + residual
    return total, torch.nn.functional.rms_norm(total, (COLS,), weight)


def run(rank, world, port):
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    check(rank, world)

    def row(name, size, call):
        us = measured(call)
        if rank == 0:
            print(f"nccl,{world},{name},{size},{us:.2f}", flush=True)

    for size in SIZES:
        x = torch.zeros(size // 2, dtype=torch.bfloat16, device="cuda")
        part = torch.zeros(size // 2 // world, dtype=torch.bfloat16, device="cuda")
        row("all_reduce", size, lambda: dist.all_reduce(x))
        row("reduce_scatter", size, lambda: dist.reduce_scatter_tensor(part, x))
        row("all_gather", size, lambda: dist.all_gather_into_tensor(x, part))
    for rows in ROWS:
        x, residual = (torch.zeros(rows, COLS, dtype=torch.bfloat16, device="cuda") for _ in range(2))
        weight = torch.zeros(COLS, dtype=torch.bfloat16, device="cuda")

        def both():
            dist.all_reduce(x)
            return norm(x, residual, weight)

        row("all_reduce, norm", f"{rows}x{COLS}", both)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count())
    parser.add_argument("--port", type=int, default=29511)
    args = parser.parse_args()
    print("library,ranks,operator,size,us")
    mp.spawn(run, args=(args.ranks, args.port), nprocs=args.ranks)
