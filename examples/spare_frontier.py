"""Time to train over redundancy, for three failure rates: `python examples/spare_frontier.py`."""

from prism_core import spare
from prism_core.units import duration_text

GROUPS, SAVE_S, RESTART_S = 600, 60, 3600

for mtbf_s in (300, 1800, 7200):
    rows = spare.frontier(
        GROUPS, save_s=SAVE_S, restart_s=RESTART_S, system_mtbf_s=mtbf_s, redundancy=(1, 12), placements=["golomb"]
    )
    print(f"a failure every {duration_text(mtbf_s)}:")
    best = min(row["relative_time"] for row in rows)
    for row in rows:
        bar = "#" * round(10 * min(row["relative_time"], 6))
        mark = "  <- best" if row["relative_time"] == best else ""
        print(f"  r {row['r']:>2}  {row['relative_time']:6.2f} x  {bar}{mark}")
