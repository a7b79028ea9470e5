# first_torch.py: one all-reduce of torch.distributed over NCCL, and a line on rank 0 when it has ended. A rank program:
#   gorun -np 2 python3 first_torch.py
#   torchrun --standalone --nproc-per-node 2 first_torch.py
import os

import torch
import torch.distributed as dist

device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
torch.cuda.set_device(device)
dist.init_process_group("nccl", device_id=device)
x = torch.ones(2, device=device)
dist.all_reduce(x)
torch.cuda.synchronize()
assert x[0].item() == dist.get_world_size()
if dist.get_rank() == 0:
    print(f"first all-reduce of {dist.get_world_size()} ranks, torch {torch.__version__}", flush=True)
dist.destroy_process_group()
