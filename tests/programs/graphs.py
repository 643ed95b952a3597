"""CUDA graphs as programs use them: a captured step with side streams and NCCL calls, replayed many times."""

import os
import sys
import time

import torch
import torch.distributed as dist


def copies_happen_on_replay() -> None:
    """What a graph copies is what is there when it is launched."""
    source = torch.tensor([1.0, 2.0], device="cuda")
    target = torch.tensor([0.0, 0.0], device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        target.copy_(source)
    assert target.tolist() == [0.0, 0.0], "a capture does nothing by itself"
    source.copy_(torch.tensor([3.0, 4.0]))
    graph.replay()
    assert target.tolist() == [3.0, 4.0], target.tolist()


def payloads_come_on_replay() -> None:
    """What a captured collective receives is of what is there when the graph is launched."""
    world = dist.get_world_size()
    count = torch.tensor([3, 5], device="cuda")
    counts = torch.zeros(2 * world, dtype=torch.int64, device="cuda")
    dist.all_reduce(count)  # the communicator is made before the capture
    count.copy_(torch.tensor([3, 5]))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        dist.all_reduce(count)
        dist.all_gather_into_tensor(counts, count)
    assert count.tolist() == [3, 5] and not any(counts.tolist()), "a capture does nothing by itself"
    for sizes in ([3, 5], [7, 1]):
        count.copy_(torch.tensor(sizes))
        graph.replay()
        total = [world * size for size in sizes]
        assert count.tolist() == total and counts.tolist() == world * total, (count.tolist(), counts.tolist())


def wrong_use_is_refused() -> None:
    """What CUDA does not allow while capturing fails here too."""
    stream = torch.cuda.Stream()
    event = torch.cuda.Event()
    event.record()
    for mistake in (torch.cuda.synchronize, lambda: event.wait(torch.cuda.current_stream())):
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, stream=stream):
                mistake()
        except RuntimeError as error:
            assert "captur" in str(error), error
        else:
            raise AssertionError(f"{mistake} was captured")


def main() -> None:
    """Trains a little model whose whole step is one graph."""
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    copies_happen_on_replay()
    payloads_come_on_replay()
    wrong_use_is_refused()
    layers = [torch.nn.Linear(2048, 2048, bias=False, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    inputs = torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16)
    side = torch.cuda.Stream()

    def step() -> None:
        optimizer.zero_grad(set_to_none=False)
        model(inputs).sum().backward()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
        torch.cuda.current_stream().wait_stream(side)
        optimizer.step()

    warm = torch.cuda.Stream()
    with torch.cuda.stream(warm):
        for _ in range(2):
            step()
    torch.cuda.synchronize()
    times = []
    for replayed in (False, True):
        if replayed:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                step()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        host = time.perf_counter()
        begin.record()
        for _ in range(10):
            graph.replay() if replayed else step()
        end.record()
        host = time.perf_counter() - host
        end.synchronize()
        times.append((begin.elapsed_time(end), 1e3 * host))
    print(f"eager {times[0][0]:.3f} ms, host {times[0][1]:.3f} ms")
    print(f"graph {times[1][0]:.3f} ms, host {times[1][1]:.3f} ms")
    dist.barrier()
    dist.destroy_process_group()
    print("done")


if __name__ == "__main__":
    sys.exit(main())
