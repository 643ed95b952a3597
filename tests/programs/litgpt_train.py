"""litgpt's GPT under Lightning Fabric with FSDP, bf16."""

import argparse
import os

import lightning as L
import torch
from lightning.fabric.strategies import FSDPStrategy
from litgpt.model import GPT, Block, Config


def main() -> None:
    """Sets up Fabric, trains, prints."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--iters", type=int, default=3)
    args = parser.parse_args()
    world, local = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])
    strategy = FSDPStrategy(auto_wrap_policy={Block}, sharding_strategy="FULL_SHARD")
    fabric = L.Fabric(devices=local, num_nodes=-(-world // local), strategy=strategy, precision="bf16-mixed")
    fabric.launch()
    fabric.seed_everything(1)
    config = Config(block_size=256, vocab_size=1000, padded_vocab_size=1024, n_layer=4, n_head=8, n_embd=512)
    with fabric.init_module(empty_init=False):
        model = GPT(config)
    model = fabric.setup(model)
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-3))
    for _ in range(args.iters):
        tokens = torch.randint(0, 1000, (4, 256), device=fabric.device)
        logits = model(tokens)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    fabric.barrier()
    print(f"rank {fabric.global_rank}: {args.iters} steps, peak {torch.cuda.max_memory_allocated()}")
    print("done")


if __name__ == "__main__":
    main()
