"""A training loop on Hugging Face accelerate: DDP or FSDP2, whatever `--mode` says, bf16."""

import argparse

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    """Prepares, trains, gathers a metric, prints."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", choices=["ddp", "fsdp2"], default="ddp")
    parser.add_argument("--iters", type=int, default=3)
    args = parser.parse_args()
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2) if args.mode == "fsdp2" else None
    accelerator = Accelerator(mixed_precision="bf16", fsdp_plugin=plugin)
    set_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(64, 512), *[torch.nn.Linear(512, 512) for _ in range(3)])
    data = TensorDataset(torch.randn(8 * args.iters * accelerator.num_processes, 64))
    loader = DataLoader(data, batch_size=8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    steps = 0
    for (inputs,) in loader:
        loss = model(inputs).float().pow(2).mean()
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        accelerator.gather(loss.detach())
        steps += 1
    accelerator.wait_for_everyone()
    print(f"rank {accelerator.process_index}: {steps} steps, peak {torch.cuda.max_memory_allocated()}")
    accelerator.end_training()
    print("done")


if __name__ == "__main__":
    main()
