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

from prism_core.spare.job import JobFacts, plan_job, read_job, replayed, stacking_memory
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
    time_to_wipe_out,
    wipe_out_index,
)
from prism_core.spare.layout import Layout, Plan
from prism_core.spare.options import Details, LocalCheckpoints
from prism_core.spare.planning import frontier, plan, simulate
from prism_core.spare.plots import frontier_svg, save_frontier, save_timeline, timeline_svg
from prism_core.spare.published import published
from prism_core.spare.tables import sweep, write_table
from prism_core.spare.timeouts import Timeouts, timeouts
from prism_core.spare.traces import FailureSource, FailureTrace, Fit, failure_table, fit, read_trace

__all__ = [
    "Details",
    "FailureSource",
    "FailureTrace",
    "Fit",
    "Intervals",
    "JobFacts",
    "Layout",
    "LocalCheckpoints",
    "Plan",
    "SpreadPlacement",
    "Timeouts",
    "availability",
    "checkpoint_interval",
    "expected_masked",
    "failure_table",
    "fit",
    "frontier",
    "frontier_svg",
    "intervals",
    "masked_probability",
    "max_redundancy",
    "mean_endurable_failures",
    "min_stacks",
    "offsets",
    "overhead_lower_bound",
    "plan",
    "plan_job",
    "published",
    "read_job",
    "read_trace",
    "redundancy_rule",
    "relative_time",
    "replayed",
    "save_frontier",
    "save_timeline",
    "simulate",
    "spread",
    "stack_thresholds",
    "stacking_memory",
    "sweep",
    "time_to_wipe_out",
    "timeline_svg",
    "timeouts",
    "wipe_out_index",
    "write_table",
]
