"""NCCL's environment variables, as far as they change what collectives cost.

The variables of a job are part of its profile (the table `network.nccl`), and so of its graph: collecting keeps those
of the environment, emulating compares them, a replay may change them.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from typing import Any

from prism_core import _native
from prism_core.errors import ConfigError

DEFAULT_PROFILE = "h100-sxm"


def settings_of_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of an environment that the engine understands; others (NCCL_DEBUG, ...) change no times."""
    return {name: environment[name] for name in _native.nccl_setting_names() if environment.get(name)}


def settings_of_profile(profile: str) -> dict[str, str]:
    """The variables that a profile holds."""
    return dict(_network(profile).get("nccl", {}))


def _network(profile: str) -> dict[str, Any]:
    try:
        network = tomllib.loads(profile).get("network", {})
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"profile: {error}") from None
    return network if isinstance(network, dict) else {}


def with_environment(profile: str, environment: Mapping[str, str]) -> tuple[str, list[str]]:
    """A profile with the variables of an environment, and what the user should know of it.

    What the environment does not set stays as the profile has it. A profile that does not choose as NCCL does is left
    alone.
    """
    recorded, given = settings_of_profile(profile), settings_of_environment(environment)
    if not given:
        return profile, []
    if not str(_network(profile).get("tuning", "")).startswith("nccl-"):
        names = ", ".join(f"{name}={value}" for name, value in given.items())
        return profile, [f"{names} of the environment is not followed: the profile's network.tuning is not NCCL's"]
    return with_settings(profile, merged(recorded, given)), []


def parse_settings(texts: Iterable[str]) -> dict[str, str]:
    """Reads `NAME=VALUE` texts; an empty value stands for a variable that is not set."""
    settings = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise ConfigError(f"--nccl {text}: it must be NAME=VALUE, for example NCCL_ALGO=Ring")
        settings[name] = value
    return settings


def with_settings(profile: str, settings: Mapping[str, str], tuning: str | None = None) -> str:
    """A profile with these variables in place of its own, and with another tuning if one is given.

    Raises:
        ConfigError: A variable or value is unknown, or asks for an algorithm that is not modelled.
    """
    kept = {name: value for name, value in settings.items() if value}
    return _native.profile_with_nccl(profile, kept, tuning)


def merged(recorded: Mapping[str, str], given: Mapping[str, str]) -> dict[str, str]:
    """The recorded variables with the given ones in their place; an empty given value removes one."""
    return {name: value for name, value in {**recorded, **given}.items() if value}


def differences(recorded: Mapping[str, str], used: Mapping[str, str]) -> list[str]:
    """Where variables are not those the graph was collected with, a sentence each."""
    names = sorted({*recorded, *used})
    return [
        f"{name} is {used.get(name, 'not set')}, and was {recorded.get(name, 'not set')} when the graph was collected"
        for name in names
        if recorded.get(name) != used.get(name)
    ]
