"""One bad part among 8,192 ranks, and how it looks: `python examples/bad_parts.py`.

A slow GPU, a network card at half speed, a link that comes and goes, a rank that dies: what each costs, who is named.
"""

from prism_core import diagnose, replay
from prism_core.perturb import Perturbation, RankDeath, SlowLink, Straggler
from prism_core.synthetic import transformer_step

MS = 1_000_000
step = transformer_step(dp=128, tp=8, pp=8, microbatches=16, layers=1, iterations=3, tensor_bytes=4 << 20)
healthy = replay(step).iteration_time_ns
#: The link of rank 100 is bad for 5 ms of every 20 ms.
flaps = [SlowLink(ranks=[100], bandwidth_factor=0.05, time_ns=(at, at + 5 * MS)) for at in range(0, 600 * MS, 20 * MS)]

cases: dict[str, list[Perturbation]] = {
    "a GPU 30 % slower (rank 5000)": [Straggler(ranks=[5000], factor=1.3)],
    "a network card at half speed (rank 4242)": [SlowLink(ranks=[4242], bandwidth_factor=0.5)],
    "a link that flaps (rank 100)": list(flaps),
    "a rank that dies in iteration 2 (rank 777)": [RankDeath(rank=777, iteration=2)],
}

print(f"healthy: {healthy[-1] / 1e6:.3f} ms a step of {step.world_size:,} ranks")
for name, perturb in cases.items():
    found = diagnose(step, perturb=perturb, sensitivities=False)
    if found["hang"] is None:
        extra = found["iteration_time_ns"][-1] / healthy[-1] - 1
        print(f"{name}: {extra:+.1%}")
    else:
        print(f"{name}: the job stands still; look at {found['hang']['culprits']}")
    print(f"  {found['headline']}")
    culprit = found["waiting"] and found["waiting"]["culprit"]
    for named in found["communicators"] if culprit else []:
        if named["communicator"] == (culprit["longer"] or {}).get("communicator") and named["size"] == 2:
            print(f"  communicator {named['communicator']} joins ranks {named['members']}")
