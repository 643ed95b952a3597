"""Timeouts of a fault-tolerant training: in the wrong order they kill healthy replicas."""

from __future__ import annotations

from dataclasses import dataclass

from prism_core.errors import ConfigError


@dataclass(frozen=True)
class Timeouts:
    """Timeouts in the right order; `timeouts` makes them.

    Attributes:
        inter_replica_s: Of collectives between replicas: so long after a peer's death the others notice it.
        intra_replica_s: Of the watchdog inside a replica.
        initialisation_s: Of the first collectives, when ranks still start.
    """

    inter_replica_s: float
    intra_replica_s: float
    initialisation_s: float

    @property
    def detection_s(self) -> float:
        """From the death of a peer to its being noticed, seconds: `detection_s` of `simulate`."""
        return self.inter_replica_s


def timeouts(inter_replica_s: float, intra_replica_s: float, initialisation_s: float) -> Timeouts:
    """Checks that timeouts fire from the outside to the inside.

    While replicas wait for a dead peer, the ranks inside a replica wait for their leader. If their watchdog fires
    first, it ends a replica that is healthy.

    Raises:
        ConfigError: The order is wrong, or one of them is not above 0.
    """
    given = {"inter_replica_s": inter_replica_s, "intra_replica_s": intra_replica_s}
    for name, value in (given | {"initialisation_s": initialisation_s}).items():
        if not value > 0 or value == float("inf"):
            raise ConfigError(f"{name} is {value}: it must be a time above 0")
    if intra_replica_s <= inter_replica_s:
        raise ConfigError(
            f"intra-replica watchdog ({intra_replica_s:g} s) fires before the inter-replica timeout"
            f" ({inter_replica_s:g} s): healthy replicas are killed; make it longer"
        )
    if initialisation_s < intra_replica_s:
        raise ConfigError(
            f"initialisation timeout ({initialisation_s:g} s) is below the intra-replica watchdog"
            f" ({intra_replica_s:g} s): replicas that still start are killed; make it longer"
        )
    return Timeouts(inter_replica_s, intra_replica_s, initialisation_s)
