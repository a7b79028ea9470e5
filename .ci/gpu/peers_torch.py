# peers_torch.py [flags]: times torch.distributed's all_reduce over NCCL, eager and in CUDA graphs, as gorun-bench times gorun's. A rank program:
#   gorun -np 2 python3 peers_torch.py
# Rank 0 prints a JSON object for each time: operation, calls, bytes, microseconds a call (mean over the ranks), versions.
import argparse
import json
import os
import time

import torch
import torch.distributed as dist

flags = argparse.ArgumentParser()
flags.add_argument("--sizes", default="8,64,512,4096,32768", help="bytes, separated by commas")
flags.add_argument("-n", type=int, default=100, help="timed eager calls")
flags.add_argument("-g", type=int, default=20, help="calls in a graph")
flags.add_argument("-G", type=int, default=10, help="timed launches of a graph")
flags.add_argument("-w", type=int, default=20, help="untimed calls before; launches: a quarter of it")
args = flags.parse_args()

local = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local)
device = torch.device("cuda", local)
dist.init_process_group("nccl", device_id=device)
rank, size = dist.get_rank(), dist.get_world_size()


def timed(enqueue, n, calls_each):
    """Microseconds a call: n times enqueue, then one wait; the mean over the ranks."""
    dist.barrier()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(n):
        enqueue()
    torch.cuda.synchronize()
    us = (time.perf_counter() - start) * 1e6 / (n * calls_each)
    all_us = torch.tensor([us], dtype=torch.float64, device=device)
    dist.all_reduce(all_us)
    return all_us.item() / size


def report(calls, nbytes, us):
    if rank == 0:
        version = torch.cuda.nccl.version()
        nccl = ".".join(map(str, version)) if isinstance(version, tuple) else str(version)
        print(json.dumps({"op": "all-reduce", "calls": calls, "bytes": nbytes, "us": us,
                          "torch": torch.__version__, "nccl": nccl}), flush=True)


for nbytes in map(int, args.sizes.split(",")):
    x = torch.zeros(nbytes // 4, device=device)

    def call():
        dist.all_reduce(x)

    for _ in range(args.w + 1):
        call()
    torch.cuda.synchronize()
    report("eager", nbytes, timed(call, args.n, 1))

    graph = torch.cuda.CUDAGraph()
    # The watchdog's thread asks for events meanwhile, which would end a capture in the default mode.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(args.g):
            call()
    for _ in range(args.w // 4 + 1):
        graph.replay()
    torch.cuda.synchronize()
    report("captured", nbytes, timed(graph.replay, args.G, args.g))
    graph.reset()  # a live graph would hold up the end of the process group

dist.destroy_process_group()
