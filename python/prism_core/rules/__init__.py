"""Rules: what stands in for values that nobody computes. `docs/concepts/values.md` tells which value a rule is for."""

from prism_core.rules.values import LossScale, Read, Routing, ValueRules, load_value_rules

__all__ = ["LossScale", "Read", "Routing", "ValueRules", "load_value_rules"]
