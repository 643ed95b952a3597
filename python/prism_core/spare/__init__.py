"""Fault-tolerant pretraining: which redundancy, which placement, which checkpoint interval, and what it costs.

`N` model-parallel groups train on `N` shard types; each group holds the data of `r` types, so that others can cover for
groups that failed (SPARe, arXiv 2603.00357). See `docs/concepts/spare.md`. Nothing here needs torch.

```python
from prism_core import spare

layout = spare.Layout(600, 8)
layout.fail([17])  # -> Plan(action='reorder', stacks=2, moves=..., ...)
spare.plan(600, system_mtbf_s=300, restart_s=3600, save_s=60, compute_s=64, all_reduce_s=6, steps=10_000)
```
"""

from prism_core.spare.laws import (
    Intervals,
    SpreadPlacement,
    availability,
    checkpoint_interval,
    expected_masked,
    intervals,
    masked_probability,
    max_redundancy,
    mean_endurable_failures,
    min_stacks,
    offsets,
    overhead_lower_bound,
    redundancy_rule,
    relative_time,
    spread,
    stack_thresholds,
    wipe_out_index,
)
from prism_core.spare.layout import Layout, Plan
from prism_core.spare.planning import frontier, plan, simulate

__all__ = [
    "Intervals",
    "Layout",
    "Plan",
    "SpreadPlacement",
    "availability",
    "checkpoint_interval",
    "expected_masked",
    "frontier",
    "intervals",
    "masked_probability",
    "max_redundancy",
    "mean_endurable_failures",
    "min_stacks",
    "offsets",
    "overhead_lower_bound",
    "plan",
    "redundancy_rule",
    "relative_time",
    "simulate",
    "spread",
    "stack_thresholds",
    "wipe_out_index",
]
