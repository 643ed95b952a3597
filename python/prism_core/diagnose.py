"""Diagnosis: why a job hangs, or who makes an iteration as long as it is. The culprit comes first."""

from __future__ import annotations

import json
import os
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from prism_core import _native
from prism_core.config import check_slow
from prism_core.errors import ConfigError
from prism_core.perturb import Perturb, perturbation_text
from prism_core.replay import open_graph
from prism_core.report import ranks_text
from prism_core.run_diagnosis import diagnose_run

_SHOWN = 8
_WIDTH = 100
_GIB = 1 << 30
#: Lines of a list in a text: the answer fits onto one screen, --json has the rest.
_LINES = 4


def diagnose(
    source: _native.Graph | str | os.PathLike[str],
    *,
    slow: Mapping[int, float] | None = None,
    perturb: Perturb | None = None,
    iteration: int | None = None,
    sensitivities: bool = True,
    top: int = _SHOWN,
    card_bytes: int | None = None,
) -> dict[str, Any]:
    """Explains a job, or says what went wrong in a run.

    Args:
        source: A graph, the path of its file, or a run folder.
        slow: Slow-down of single ranks' compute, for example `{4242: 1.3}` (graphs only).
        perturb: Changes to the job, as for `prism_core.replay` (graphs only).
        iteration: Which iteration, from 0; the last if not said (graphs only).
        sensitivities: Replay again with single things slower (graphs only).
        top: Entries of each list at most.
        card_bytes: Memory of a card, if other than the profile's (graphs only).

    Returns:
        The document of `prism diagnose --json` (docs/diagnose.md).
    """
    if not isinstance(source, _native.Graph):
        if Path(source).is_dir():
            if slow or perturb:
                raise ConfigError(f"{source} is a run folder: slow and perturb change a graph, the run is over")
            how: dict[str, Any] = {
                "iteration": iteration,
                "sensitivities": sensitivities,
                "top": top,
                "card_bytes": card_bytes,
            }
            return diagnose_run(Path(source), card_bytes, lambda graph, **changes: diagnose(graph, **changes, **how))
        source = open_graph(source)
    options = {
        "slow": check_slow(slow or {}, source.world_size),
        "perturb": perturbation_text(perturb),
        "iteration": iteration,
        "sensitivities": sensitivities,
        "top": top,
        "card_bytes": card_bytes,
    }
    document: dict[str, Any] = json.loads(_native.diagnose_json(source, json.dumps(options)))
    return document


def diagnose_text(document: Mapping[str, Any]) -> str:
    """What `prism diagnose` prints."""
    body = list(_run_lines(document)) if "run" in document else []
    job = document.get("job") if "run" in document else document
    if job:
        body += _hang_lines(job["hang"]) if job["hang"] else _time_lines(job)
    notes = (_wrapped(f"note: {note}") for note in document["notes"])
    return "\n".join([_wrapped(document["headline"]), *body, *notes])


def _wrapped(text: str) -> str:
    return textwrap.fill(text, _WIDTH, subsequent_indent="  ")


def _run_lines(document: Mapping[str, Any]) -> Iterator[str]:
    error = document["run"]["error"]
    yield from error["message"].splitlines()[1:] if error else ()
    for rank in document["run"]["ranks"]:
        code = "" if rank["exit_code"] is None else f", exit code {rank['exit_code']}"
        last = _cut(rank["last_op"] or "none", 60)
        yield f"  rank {rank['rank']}: {rank['iterations']} iterations{code}, last op {last}"


def _hang_lines(hang: Mapping[str, Any]) -> Iterator[str]:
    yield f"look at   {ranks_text(hang['culprits'])}"
    yield textwrap.fill(f"advice    {hang['advice']}", _WIDTH, subsequent_indent=" " * 10)
    for title, blocked in (("cause", hang["roots"]), ("held up", hang["victims"])):
        for wait in blocked[:_SHOWN]:
            line = (
                f"{title:<9} {ranks_text(wait['waiting'])} in {wait['call']} {wait['sequence']} of communicator "
                f"{wait['communicator']} (op {wait['op']} on stream {wait['stream']}, {wait['bytes']:,} bytes of "
                f"{wait['dtype']}, {len(wait['members'])} members) for {ranks_text(wait['missing'])}{_hopes(wait)}"
            )
            yield textwrap.fill(line, _WIDTH, subsequent_indent=" " * 10)
        if len(blocked) > _SHOWN:
            yield f"{title:<9} and {len(blocked) - _SHOWN} more"


def _hopes(wait: Mapping[str, Any]) -> str:
    """Why those that are waited for will not come, if they will not."""
    why = (("dead", "dead"), ("ended", "over without the call"), ("never", "without such a call left"))
    told = [
        f"{ranks_text(wait[key])} {'is' if len(wait[key]) == 1 else 'are'} {text}" for key, text in why if wait[key]
    ]
    return "; " + ", ".join(told) if told else ""


def _time_lines(document: Mapping[str, Any]) -> Iterator[str]:
    path = document["critical_path"]
    names = {named["communicator"]: _communicator(named) for named in document["communicators"]}
    where = f"{path['num_segments']} segments on {path['num_ranks']} ranks"
    yield f"\niteration {document['iteration']}: {_ms(path['ns'])}, {where}"
    yield from _part_lines(path["parts"], names)
    shares = ", ".join(f"{rank['rank']} ({100 * rank['share']:.1f} %)" for rank in path["ranks"][:_SHOWN])
    yield textwrap.fill(f"  on ranks  {shares}", _WIDTH, subsequent_indent=" " * 12)
    for account in document["accounts"][:2]:
        yield f"\nrank {account['rank']} ({account['why'].replace('_', ' ')})"
        yield from _part_lines(account["parts"], names)
    yield from _waiting_lines(document["waiting"], names)
    if memory := document["memory"]:
        yield f"\nmemory: {_memory(memory)}"
    if document["slack"]:
        slack = document["slack"]
        most = ", ".join(f"rank {own['rank']} {_ms(own['slack_ns'])}" for own in slack["most"][:3])
        bound = "" if slack["is_exact"] else " at least"
        yield f"\nslack: none on {slack['ranks_without']} ranks" + (f"; most{bound}: {most}" if most else "")
    if document["sensitivities"]:
        yield "\n10 % slower makes the iteration longer by"
        for item in document["sensitivities"][:_LINES]:
            yield f"  {10 * item['elasticity']:6.2f} %  {_parameter(item)}"


def _memory(memory: Mapping[str, Any]) -> str:
    """What the fullest cards need."""
    need, card = memory["peak_bytes"] + memory["context_bytes"], memory["card_bytes"]
    who = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in memory["ranks"][:_LINES])
    name = "rank" if memory["num_ranks"] == 1 else "ranks"
    return f"{name} {who} need{'s' * (memory['num_ranks'] == 1)} {need / _GIB:.2f} GiB of {card / _GIB:.2f} GiB"


def _communicator(named: Mapping[str, Any]) -> str:
    """A communicator by its number and who is in it."""
    size, members, stride = named["size"], named["members"], named["stride"]
    if size <= len(members):
        who = ranks_text(members)
    elif stride is not None:
        last = members[0] + stride * (size - 1)
        who = f"ranks {members[0]}-{last}" if stride == 1 else f"ranks {members[0]},{members[1]},...,{last}"
    else:
        who = f"{size:,} ranks: {','.join(map(str, members))},..."
    return f"{named['communicator']} ({who})"


def _waiting_lines(waiting: Mapping[str, Any], names: Mapping[int, str]) -> Iterator[str]:
    if waiting["blame"]:
        yield "\nwaited for (summed over the ranks that wait)"
    for blame in waiting["blame"][:_LINES]:
        yield (
            f"  rank {blame['rank']:<6} {_ms(blame['waited_ns']):>16} on communicator {names[blame['communicator']]}, "
            f"one rank {_ms(blame['longest_ns'])}"
        )


def _part_lines(parts: Iterable[Mapping[str, Any]], names: Mapping[int, str]) -> Iterator[str]:
    for part in list(parts)[:_LINES]:
        yield f"  {100 * part['share']:5.1f} % {_ms(part['ns']):>14}  {_spent(part, names)}"


_SPENT = {
    "collective": "collectives of communicator {}",
    "message": "messages of communicator {}",
    "waiting": "waiting for others in communicator {}",
    "bubble": "waiting for messages of communicator {}",
    "host": "host",
    "idle": "idle: through before the last rank",
}


def _spent(part: Mapping[str, Any], names: Mapping[int, str]) -> str:
    if part["what"] == "compute":
        return f"{part['class']} compute"
    return _SPENT[part["what"]].format(names.get(part.get("communicator", -1)))


def _parameter(item: Mapping[str, Any]) -> str:
    name: str = item["parameter"]
    if name == "rank_speed":
        return f"compute of rank {item['rank']}"
    return f"{item['class']} compute of all ranks" if name == "compute_class" else name.replace("_", " ")


def _ms(nanoseconds: int) -> str:
    return f"{nanoseconds / 1e6:,.3f} ms"


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 3] + "..."
