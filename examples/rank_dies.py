"""A rank dies in iteration 2, another in iteration 3, with and without SPARe: `python examples/rank_dies.py`.

8,192 ranks as 128 data-parallel groups of 64. With nothing prepared the job stands still, and the dead rank is named.
With SPARe a group holds the data of `r` shard types: survivors shrink the communicators, compute what the dead group
had to, and go on with stacks of two. If all hosts of a type are dead, only a checkpoint helps.
"""

from prism_core import diagnose, spare
from prism_core.errors import ConfigError
from prism_core.perturb import RankDeath
from prism_core.synthetic import transformer_step

TP, DP, PP = 8, 128, 8
DEATHS = {2: 777, 3: 769}  # rank by iteration
step = transformer_step(DP, TP, PP, microbatches=16, layers=1, iterations=3, tensor_bytes=4 << 20)

found = diagnose(step, perturb=[RankDeath(rank=DEATHS[2], iteration=2)], sensitivities=False)
print(f"nothing prepared: the job stands still; look at {found['hang']['culprits']}")
groups = {iteration: [rank // TP % DP] for iteration, rank in DEATHS.items()}  # ranks go tensor, data, pipeline
for r in (3, 2):
    print(f"SPARe, r = {r}; groups that die, by iteration: {groups}")
    try:
        run = spare.replayed(step, groups, r=r, iterations=5, detection_s=2.0)
    except ConfigError as error:
        print(f"  {error}")
        continue
    for row in run["iterations"]:
        time_s, live, stacks = row["time_ns"] / 1e9, row["live"], row["stacks"]
        print(f"  iteration {row['iteration']}: {time_s:.3f} s, {live} groups with stacks of {stacks}, {row['action']}")
