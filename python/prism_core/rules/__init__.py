"""Rules: what stands in for values that nobody computes.

One file (TOML) or one object holds the rules of a run: for values that the host reads where kernels are not run
(`values.py`, `docs/concepts/values.md`) and for what ranks that do not run contribute (`members.py`, host device).
"""

from pathlib import Path

from prism_core.rules.members import KINDS, Call, Rule, Rules, encode, load_rules
from prism_core.rules.values import LossScale, Read, Routing, ValueRules, load_value_rules

#: Rules, or the file they are in.
RulesLike = Rules | ValueRules | Path

__all__ = [
    "KINDS",
    "Call",
    "LossScale",
    "Read",
    "Routing",
    "Rule",
    "Rules",
    "RulesLike",
    "ValueRules",
    "encode",
    "load_rules",
    "load_value_rules",
]
