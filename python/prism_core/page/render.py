"""The page: sections in the order in which one asks, put into `templates/page.html`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from importlib.resources import files
from string import Template
from typing import Any

from prism_core.page.content import Content
from prism_core.page.run import run_sections, spare_section
from prism_core.page.words import (
    bar,
    bars,
    bytes_text,
    communicator_text,
    escape,
    pairs,
    percent,
    ranges_text,
    stacked,
    table,
    time_text,
)

_TEMPLATES = files("prism_core.page") / "templates"
#: Parts of a path by what they are: name and colour.
_PARTS = {
    "collective": ("collectives", "transfer"),
    "message": ("messages", "message"),
    "waiting": ("waiting in collectives", "waiting"),
    "bubble": ("waiting for messages", "bubble"),
    "host": ("host", "host"),
    "idle": ("idle", "idle"),
}
_CLASSES = {
    "gemm": "compute",
    "kernel": "compute2",
    "operator": "compute3",
    "memcpy": "compute4",
    "memset": "compute4",
    "wait": "waiting",
}
#: Part of the iteration from which a straggler is shown, as in a diagnosis.
_NOTICEABLE = 0.005
_PROVENANCE = {"measured": "good", "imported": "compute", "modelled": "compute2", "default": "host"}


def render(content: Content) -> str:
    """The page as text; the same content gives the same text."""
    sections = [section for section in _sections(content) if section]
    page = Template((_TEMPLATES / "page.html").read_text(encoding="utf-8"))
    return page.substitute(
        title=escape(content["title"]),
        style=(_TEMPLATES / "style.css").read_text(encoding="utf-8"),
        script=(_TEMPLATES / "map.js").read_text(encoding="utf-8"),
        data=_embedded(_maps(content)),
        header=_header(content),
        sections="\n".join(sections),
    )


def _embedded(document: Any) -> str:
    """JSON that cannot end the element it stands in."""
    text = json.dumps(document, separators=(",", ":"), sort_keys=True)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _maps(content: Content) -> dict[str, Any]:
    """What the script draws."""
    states = {"now": content["overview"], "before": (content["before"] or {}).get("overview")}
    keys = ("iteration", "length_ns", "map", "path", "ranks_examined")
    return {name: {key: found[key] for key in keys} for name, found in states.items() if found}


def _section(title: str, body: str, remark: str = "") -> str:
    if not body:
        return ""
    note = f'<p class="remark">{remark}</p>' if remark else ""
    return f"<section><h2>{escape(title)}</h2>{note}{body}</section>"


def _header(content: Content) -> str:
    ranks = f"{content['world_size']:,} rank{'' if content['world_size'] == 1 else 's'}"
    what = "run of a job of" if content["run"] else "job of"
    command = content["facts"].get("command", "")
    shown = f'<p class="command"><code>{escape(command)}</code></p>' if command else ""
    state, verdict = _verdict(content)
    headline = f'<p class="verdict {state}"><b>{_MARKS[state]}</b> <span>{escape(verdict)}</span></p>'
    eyebrow = f'<p class="eyebrow">{what} {ranks}</p>'
    return f"<header>{eyebrow}<h1>{escape(content['title'])}</h1>{shown}{headline}</header>{_cards(content)}"


_MARKS = {"good": "✓", "warn": "!", "bad": "✕"}


def _verdict(content: Content) -> tuple[str, str]:
    """How it stands, and the answer in a sentence."""
    error = content["run"]["summary"]["error"] if content["run"] else None
    if error:
        return "bad", error["message"].splitlines()[0]
    diagnosis = content["diagnosis"]
    if diagnosis is None:
        iterations = len(content["run"]["summary"]["iteration_time_ns"])
        return "good", f"the run is complete: {iterations} iterations, no error"
    over = diagnosis["memory"] and diagnosis["memory"]["over_by_bytes"]
    if diagnosis["hang"] or over:
        return "bad", diagnosis["headline"]
    culprit = diagnosis["waiting"]["culprit"]
    return ("warn" if culprit else "good"), diagnosis["headline"]


def _cards(content: Content) -> str:
    cards = list(_card_texts(content))
    shown = "".join(
        f'<div class="card"><span>{escape(name)}</span><b>{escape(value)}</b><small>{escape(remark)}</small></div>'
        for name, value, remark in cards
    )
    return f'<div class="cards">{shown}</div>' if cards else ""


def _card_texts(content: Content) -> Iterator[tuple[str, str, str]]:
    """The figures one looks at first: name, value, remark."""
    diagnosis, overview = content["diagnosis"], content["overview"]
    if content["run"]:
        times = content["run"]["summary"]["iteration_time_ns"]
        if times:
            yield "iteration time of the run", time_text(times[-1]), f"last of {len(times)}"
    elif diagnosis and diagnosis["iteration_time_ns"]:
        now = diagnosis["iteration_time_ns"][diagnosis["iteration"]]
        yield "iteration time", time_text(now), _change(content, now)
    if overview:
        totals = overview["totals"]
        whole = sum(totals.values())
        exposed = totals["transfer_ns"] + totals["waiting_ns"]
        yield "computing", percent(totals["compute_ns"], whole), "of the time of all ranks"
        yield "exposed communication", percent(exposed, whole), f"{percent(totals['waiting_ns'], whole)} waiting"
    memory = content["memory"]
    if memory and memory["groups"]:
        fullest = max(memory["groups"], key=lambda group: group["peak_bytes"])
        need = fullest["peak_bytes"] + memory["context_bytes"]
        card = memory["card_bytes"]
        yield "fullest card", percent(need, card), f"{bytes_text(need)} of {bytes_text(card)}"
    yield "ranks", f"{content['world_size']:,}", f"{content['ops']:,} ops"


def _change(content: Content, now: int) -> str:
    before = content["before"]
    if not before or not before["diagnosis"]["iteration_time_ns"]:
        return ""
    was = before["diagnosis"]["iteration_time_ns"][before["diagnosis"]["iteration"]]
    return f"{100 * (now - was) / max(was, 1):+.1f} %, was {time_text(was)}"


def _sections(content: Content) -> Iterator[str]:
    diagnosis = content["diagnosis"]
    if diagnosis and diagnosis["hang"]:
        yield _hang(diagnosis["hang"])
    yield _comparison(content)
    if diagnosis and diagnosis["critical_path"]:
        yield _critical_path(diagnosis)
    yield _map_section(content)
    if content["overview"]:
        yield _late(content["overview"])
        yield _communication(content["overview"])
    if content["memory"]:
        yield _memory(content["memory"])
    if diagnosis and diagnosis["sensitivities"]:
        yield _sensitivities(diagnosis)
    yield _provenance(content)
    yield from run_sections(content, _section)
    yield spare_section(content, _section)
    yield _notes(content)
    yield _section("Origin", pairs(content["facts"]))


def _hang(hang: Mapping[str, Any]) -> str:
    rows = []
    for title, waits in (("cause", hang["roots"]), ("held up", hang["victims"])):
        for wait in waits[:16]:
            where = f"{wait['call']} {wait['sequence']} of communicator {wait['communicator']}, op {wait['op']}"
            rows.append([title, _some(wait["waiting"]), escape(where), _some(wait["missing"])])
    body = f"<p><b>{escape(hang['cause'])}</b></p><p>{escape(hang['advice'])}</p>"
    return _section("Why it hangs", body + (table(["", "ranks", "wait in", "for ranks"], rows) if rows else ""))


def _some(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (f", … ({len(ranks):,})" if len(ranks) > 8 else "")


def _part(part: Mapping[str, Any]) -> tuple[str, str]:
    """Name and colour of a part of a path."""
    if part["what"] == "compute":
        return f"{part['class']} compute", _CLASSES.get(part["class"], "compute")
    name, kind = _PARTS[part["what"]]
    return name, kind


def _parts(parts: list[dict[str, Any]]) -> list[tuple[str, float, str]]:
    """Parts by name, communicators together, largest first."""
    sums: dict[tuple[str, str], int] = {}
    for part in parts:
        sums[_part(part)] = sums.get(_part(part), 0) + part["ns"]
    return sorted(((name, size, kind) for (name, kind), size in sums.items()), key=lambda part: -part[1])


def _critical_path(diagnosis: Mapping[str, Any]) -> str:
    path = diagnosis["critical_path"]
    named = {each["communicator"]: each for each in diagnosis["communicators"]}
    sums: dict[tuple[str, str], int] = {}
    for part in path["parts"]:
        comm = named.get(part.get("communicator", -1))
        who = communicator_text(comm["size"], comm["stride"], comm["members"]) if comm else ""
        key = (_part(part)[0], who)
        sums[key] = sums.get(key, 0) + part["ns"]
    rows = [
        [escape(what), escape(who), time_text(size), percent(size, path["ns"])]
        for (what, who), size in sorted(sums.items(), key=lambda item: (-item[1], item[0]))[:10]
    ]
    ranks = [[str(own["rank"]), bar(own["share"], "path"), f"{100 * own['share']:.1f} %"] for own in path["ranks"][:8]]
    remark = (
        f"What makes iteration {diagnosis['iteration']} as long as it is: a chain of {path['num_segments']:,} pieces "
        f"of work without a gap, over {path['num_ranks']:,} rank{'' if path['num_ranks'] == 1 else 's'}."
    )
    body = stacked(_parts(path["parts"]), "critical path by kind of work")
    lists = table(["on the path", "among", "time", "share"], rows, (2, 3))
    body += f'<div class="columns">{lists}{table(["rank", "", "share"], ranks, (2,))}</div>'
    return _section(f"Critical path: {time_text(path['ns'])}", body, remark)


def _map_section(content: Content) -> str:
    overview = content["overview"]
    if not overview:
        why = content["why_not"]
        return _section("All ranks over time", f'<p class="remark">{escape(why)}</p>' if why else "")
    shared = overview["map"]["ranks_per_row"]
    joined = f" {shared} neighbouring ranks share a row." if shared > 1 else ""
    left = overview["world_size"] - overview["ranks_examined"]
    missing = f" Ranks from {overview['ranks_examined']:,} on are left out: the job is too large." if left else ""
    remark = f"Iteration {overview['iteration']} of every rank, rank 0 on top.{joined}{missing}"
    compared = content["before"] and content["before"]["overview"]
    toggle = '<label><input type="checkbox" id="map-before"> before the changes</label>' if compared else ""
    body = Template((_TEMPLATES / "map.html").read_text(encoding="utf-8")).substitute(toggle=toggle)
    totals = overview["totals"]
    names = {"compute": "computing", "transfer": "exposed transfer", "waiting": "exposed waiting", "idle": "idle"}
    parts = [(name, totals[f"{key}_ns"], key) for key, name in names.items()]
    return _section("All ranks over time", body + stacked(parts, "time of all ranks by kind"), remark)


def _late(overview: Mapping[str, Any]) -> str:
    remark = "The slow rank is the one that does not wait. Usual: the median of the ranks with its program."
    least = _NOTICEABLE * overview["length_ns"]
    rows = [
        [
            f"<b>{late['rank']}</b>",
            time_text(late["caused_ns"]),
            time_text(late["waited_ns"]),
            time_text(late["usual_waited_ns"]),
            time_text(late["compute_ns"]),
            time_text(late["usual_compute_ns"]),
            f"{100 * (late['compute_ns'] / late['usual_compute_ns'] - 1):+.1f} %" if late["usual_compute_ns"] else "-",
        ]
        for late in overview["late"]
        if max(late["usual_waited_ns"] - late["waited_ns"], late["compute_ns"] - late["usual_compute_ns"]) >= least
    ]
    if not rows:
        return _section("Stragglers", "<p>None: no rank waits noticeably less, or computes more, than its equals.</p>")
    head = ["rank", "others waited for it", "it waits", "usual", "it computes", "usual", "more"]
    return _section("Stragglers", table(head, rows, range(1, 7)), remark)


def _communication(overview: Mapping[str, Any]) -> str:
    whole = sum(overview["totals"].values())
    costs = overview["communication"]
    most = max((cost["transfer_ns"] + cost["waiting_ns"] for cost in costs), default=0)
    rows = []
    for cost in costs[:16]:
        exposed = cost["transfer_ns"] + cost["waiting_ns"]
        shares = {kind: cost[f"{kind}_ns"] / max(most, 1) for kind in ("transfer", "waiting")}
        rows.append([
            escape(communicator_text(cost["size"], cost["stride"], cost["example"])), f"{cost['count']:,}",
            escape(", ".join(cost["calls"][:6])), bars(shares), percent(exposed, whole),
            percent(cost["waiting_ns"], whole), percent(max(cost["total_ns"] - exposed, 0), cost["total_ns"]),
        ])  # fmt: skip
    if not rows:
        return ""
    head = ["communicators of", "how many", "calls", "exposed", "of all time", "waiting", "hidden"]
    remark = "Exposed is what no computing hides. Hidden: share of their time that runs beside computing."
    return _section("Exposed communication", table(head, rows, (1, 4, 5, 6)), remark)


def _memory(memory: Mapping[str, Any]) -> str:
    groups = memory["groups"]
    if not groups:
        return ""
    card, context = memory["card_bytes"], memory["context_bytes"]
    scale = max([card, *(group["peak_bytes"] + context for group in groups)]) * 1.02
    rows = []
    for group in groups:
        need = group["peak_bytes"] + context
        kind = "over" if need > card else "memory"
        line = (
            f'<div class="bar card-line" style="--card:{100 * card / scale:.2f}%">'
            f'<span class="{kind}" style="width:{100 * group["peak_bytes"] / scale:.2f}%"></span>'
            f'<span class="idle" style="width:{100 * context / scale:.2f}%"></span></div>'
        )
        after = f", after {group['after'][:60]}" if group["after"] else ""
        rows.append([
            escape(ranges_text(group["ranks"], group["num_ranks"])), line, bytes_text(need), percent(need, card),
            escape(f"op {group['peak_op']:,} of iteration {group['peak_iteration']}{after}"),
        ])  # fmt: skip
    unlisted = f" {memory['num_unlisted']} groups that need less are not listed." if memory["num_unlisted"] else ""
    remark = (
        f"Ranks that need the same, against the card's {bytes_text(card)} (line); grey: CUDA context. As the driver "
        f"hands it out, without NCCL's buffers.{unlisted}"
    )
    return _section("Memory", table(["ranks", "", "need", "of the card", "peak at"], rows, (2, 3)), remark)


def _sensitivities(diagnosis: Mapping[str, Any]) -> str:
    found = diagnosis["sensitivities"][:8]
    most = max((item["elasticity"] for item in found), default=0) or 1
    rows = []
    for item in found:
        name = item["parameter"].replace("_", " ")
        if item["parameter"] == "rank_speed":
            name = f"compute of rank {item['rank']}"
        elif item["parameter"] == "compute_class":
            name = f"{item['class']} compute of all ranks"
        effect = 10 * item["elasticity"]
        rows.append([escape(name), bar(item["elasticity"] / most, "path"), f"{effect:+.2f} %"])
    remark = "Each line is a replay of the job with one thing 10 % slower: by how much the iteration gets longer."
    return _section("What would change it", table(["10 % slower", "", "iteration"], rows, (2,)), remark)


def _comparison(content: Content) -> str:
    before = content["before"]
    if not before:
        return ""
    changed = "".join(f"<pre>{escape(change)}</pre>" for change in content["changes"])
    diagnoses = (before["diagnosis"], content["diagnosis"])
    if not all(diagnosis["critical_path"] for diagnosis in diagnoses):
        return _section("Before and after", changed)
    lengths = [diagnosis["critical_path"]["ns"] for diagnosis in diagnoses]
    sums = [{name: size for name, size, _ in _parts(diagnosis["critical_path"]["parts"])} for diagnosis in diagnoses]
    names = sorted(sums[0].keys() | sums[1].keys(), key=lambda name: -abs(sums[1].get(name, 0) - sums[0].get(name, 0)))
    rows = [_compared("<b>iteration</b>", *lengths)]
    rows += [_compared(escape(name), *(part.get(name, 0) for part in sums)) for name in names]
    pictures = "".join(
        f'<p class="remark">{name}</p><div style="width:{100 * length / max(*lengths, 1):.2f}%">'
        f"{stacked(_parts(diagnosis['critical_path']['parts']), name)}</div>"
        for name, length, diagnosis in zip(("before", "after"), lengths, diagnoses, strict=True)
    )
    body = changed + pictures + table(["on the path", "before", "after", "change"], rows, (1, 2, 3))
    return _section("Before and after", body)


def _compared(name: str, before: float, after: float) -> list[str]:
    sign = "+" if after >= before else "-"
    return [name, time_text(before), time_text(after), f"{sign}{time_text(abs(after - before))}"]


def _provenance(content: Content) -> str:
    shares = content["provenance_ns"]
    order = sorted(shares, key=lambda name: (list(_PROVENANCE).index(name) if name in _PROVENANCE else 9, name))
    parts = [(name, float(shares[name]), _PROVENANCE.get(name, "idle")) for name in order]
    remark = (
        "Computing time of all ranks by what its durations rest on: a measurement, a trace, a model, or only the "
        "launch geometry (default)."
    )
    return _section("What the times rest on", stacked(parts, "computing time by provenance"), remark)


def _notes(content: Content) -> str:
    notes = list(content["diagnosis"]["notes"]) if content["diagnosis"] else []
    if content["run"]:
        notes += content["run"]["summary"]["notes"]
    items = "".join(f"<li>{escape(note)}</li>" for note in dict.fromkeys(notes))
    return _section("Notes", f"<ul>{items}</ul>" if items else "")
