"""Says where its rank stands in a job of 15 pipeline stages, 2 context-parallel and 8 tensor-parallel ranks."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

dist.init_process_group("nccl")
mesh = init_device_mesh("cuda", (15, 2, 8), mesh_dim_names=("pp", "cp", "tp"))
experts, _ = dist.new_subgroups(16)
token = torch.ones(1, device="cuda")
for group in (mesh.get_group("tp"), mesh.get_group("cp"), mesh.get_group("pp"), experts):
    dist.all_reduce(token, group=group)
torch.cuda.synchronize()
place = {name: mesh.get_local_rank(name) for name in ("tp", "cp", "pp")}
# 61 layers: the first stage has 5, every other one 4.
first = 0 if place["pp"] == 0 else 1 + 4 * place["pp"]
last = 4 * place["pp"] + 4
print(f"rank {dist.get_rank()}: {place}, expert {dist.get_rank(experts)}, layers {first}-{last}", flush=True)
