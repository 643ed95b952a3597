"""When does every rank get out of a collective, does a job fit together? The engine's models by name, without a graph.

```python
from prism_core.collectives import completion

completion("chain_broadcast", chunks=4, credits=0, occ_ns_of_sender=[10, 10, 10],
           latency_ns_of_incoming_link=[5, 5, 5], arrival_ns=[0, 0, 100])  # [40, 55, 115]
```

Links have an occupancy (how long a message keeps them busy) and a latency; `arrival_ns` says when every rank comes to
the collective. Times are whole numbers in any one unit, below 2^60.
"""

from __future__ import annotations

import json
from typing import Any

from prism_core import _native
from prism_core.errors import ConfigError

__all__ = ["completion", "models"]


def models() -> list[str]:
    """Names of the models that [`completion`][prism_core.collectives.completion] knows."""
    return _native.collective_models()


def completion(model: str, **inputs: Any) -> Any:
    """What a model answers to its inputs.

    Args:
        model: One of [`models`][prism_core.collectives.models].
        inputs: The model's inputs by name: numbers, texts, lists, dictionaries; arrays are taken as lists.

    Returns:
        The end of every rank as a list of int, in the order of `arrival_ns` (of every actor for `job_explicit`). For
        `matching` a dictionary: `finish_ns` (end of the last op each rank completed), `stuck` (ranks that did not
        complete their programs), `mismatches` (ops about which their members disagree), `cycle_length` (ops of the
        shortest cycle of waits, or 0) and `n_missing` (calls that ranks which have ended never made).

    Raises:
        ConfigError: The model is not known, or an input is missing, unknown, ill-sized, negative or so large that times
            may exceed 2^60; the message names it.
        DeadlockError: The actors of `job_explicit` wait for each other; the message says who waits for whom.
        MismatchError: The actors of `job_explicit` disagree about an op.
    """
    try:
        text = json.dumps(inputs, default=_plain, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{model}: inputs must be numbers, texts, lists and dictionaries: {error}") from None
    return json.loads(_native.collective_completion(model, text))


def _plain(value: Any) -> Any:
    """Arrays as lists, their elements as numbers."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"a {type(value).__name__} is none")
