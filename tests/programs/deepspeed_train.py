"""A training loop on DeepSpeed: ZeRO stage 1, 2 or 3, bf16."""

import argparse

import deepspeed
import torch


class Block(torch.nn.Module):
    """A residual MLP."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


def main() -> None:
    """Initialises, trains, prints."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--iters", type=int, default=3)
    parser.add_argument("--local_rank", type=int, default=0)
    args = parser.parse_args()
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
        "zero_optimization": {"stage": args.stage, "stage3_param_persistence_threshold": 0},
        "steps_per_print": 1,
    }
    deepspeed.init_distributed("nccl")
    torch.manual_seed(0)
    with deepspeed.zero.Init(config_dict_or_path=config, enabled=args.stage == 3):
        model = torch.nn.Sequential(*[Block(512) for _ in range(4)])
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    for _ in range(args.iters * 2):
        inputs = torch.randn(4, 512, device=engine.device, dtype=torch.bfloat16)
        loss = engine(inputs).float().pow(2).mean()
        engine.backward(loss)
        engine.step()
    torch.cuda.synchronize()
    print(f"rank {engine.global_rank}: {engine.global_steps} steps, peak {torch.cuda.max_memory_allocated()}")
    print("done")


if __name__ == "__main__":
    main()
