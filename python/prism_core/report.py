"""Reports: the run folder (summary.json, timing.json) and the texts the commands print.

`summary.json` holds what every equal run finds, byte for byte; what depends on the machine is in `timing.json`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from prism_core.errors import ConfigError
from prism_core.fit import job_rows, rank_rows
from prism_core.memory import device_memory
from prism_core.values import GRADES, site_text

SUMMARY = "summary.json"
TIMING = "timing.json"

_MIB = 1 << 20
_SHOWN = 8
# Ranges of ranks in a list that was asked for.
_RANGES = 64


def to_json(document: Any) -> str:
    """The document as text that is the same for equal documents."""
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


def read_run(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Summary and timing of a run folder."""
    documents = []
    for name in (SUMMARY, TIMING):
        try:
            documents.append(json.loads((folder / name).read_text(encoding="utf-8")))
        except OSError as error:
            raise ConfigError(f"{folder} is not a run folder: cannot read {name} ({error.strerror})") from error
        except ValueError as error:
            raise ConfigError(f"{folder / name} is damaged: {error}") from error
    return documents[0], documents[1]


# Texts


def _milliseconds(nanoseconds: float) -> str:
    return f"{nanoseconds / 1e6:.3f} ms"


def _mebibytes(size: float) -> str:
    return f"{size / _MIB:.2f} MiB"


def _seconds(nanoseconds: float) -> str:
    return f"{nanoseconds / 1e9:.2f} s"


def _times(times: Sequence[int]) -> str:
    shown = ", ".join(_milliseconds(time) for time in times[:_SHOWN])
    return shown + (f" and {len(times) - _SHOWN} more" if len(times) > _SHOWN else "") if times else "none seen"


def _share_lines(shares: Mapping[str, float]) -> Iterable[tuple[str, str]]:
    total = sum(shares.values())
    for name, value in sorted(shares.items()):
        yield name, f"{100 * value / total:.1f} %" if total else "0 %"


def _provenance(document: Mapping[str, Any]) -> Mapping[str, float]:
    """Device time of computation by what its durations rest on."""
    shares: Mapping[str, float] = document["device_time"]["by_provenance"]
    return shares


def ranks_text(ranks: Sequence[int], shown: int = _SHOWN) -> str:
    """Ranks in words, neighbours as ranges, cut after `shown` ranges."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    listed = ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs[:shown])
    more = f",... ({len(ranks)} in all)" if len(runs) > shown else ""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {listed}{more}"


def _sandbox_rows(document: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    """The virtual ranks that exchange data with the sandbox, where somebody asked for them."""
    if "materialised_ranks" in document:
        ranks = document["materialised_ranks"]
        listed = f": {ranks_text(ranks, _RANGES)}" if ranks else ""
        count = f"{len(ranks)} virtual rank{'' if len(ranks) == 1 else 's'} materialised"
        yield "sandbox", f"{ranks_text(document['sandbox'])}; {count}{listed}"


def _table(rows: Iterable[tuple[str, str]]) -> str:
    kept = list(rows)
    width = max((len(name) for name, _ in kept), default=0)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in kept)


def tolerance_rows(farthest: Mapping[str, Any] | None) -> Iterable[tuple[str, str]]:
    """How much was taken for equal that is not."""
    if farthest is not None:
        text = f"rank {farthest['rank']} is {farthest['share']:.3%} from rank {farthest['stand_in']}, its stand-in"
        yield "nearly alike", f"{text}: the farthest of those that ran"


def collect_text(document: Mapping[str, Any]) -> str:
    """What `prism collect` prints."""
    rows = [
        ("graph", f"{document['graph']} ({_mebibytes(document['graph_bytes'])})"),
        ("ranks", f"{document['world_size']}: {len(document['ranks_run'])} run, {document['ranks_inferred']} inferred"),
        ("verified on", ", ".join(map(str, document["ranks_verified"])) or "no rank: none was inferred"),
        ("roles", f"{document['roles']}, told apart by {document['role_distinction']}"),
        *tolerance_rows(document.get("role_farthest")),
        ("ops", f"{document['ops']:,}"),
        *(row for rank in document["ranks"] for row in _collected_rank_rows(rank)),
        *job_rows(document.get("memory")),
        *_influence_rows(document.get("influence")),
        *clock_rows(document.get("clocks")),
        *_bootstrap_rows(document.get("bootstrap")),
        ("took", f"{_seconds(document['wall_ns'])}, largest rank {_mebibytes(document['peak_rank_rss_bytes'])}"),
        *(("note", note) for note in document["notes"]),
        *(("store", f"{note['rule']}: {note['key']}") for note in document["store"]),
    ]
    return _table(rows)


def _collected_rank_rows(rank: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    name = f"rank {rank['rank']}"
    if "memory" in rank:
        yield f"{name} memory", f"{rank['memory']['verdict']} ({_mebibytes(rank['memory']['total_bytes'])} in all)"
    yield from _value_rows(name, rank.get("values"))


#: Clocks that are listed at most.
_CLOCKS_SHOWN = 8


def clock_rows(clocks: Mapping[str, Any] | None) -> Iterable[tuple[str, str]]:
    """Clocks of slices, or how the machine's speed changed between the first slice and its repetition."""
    for entry in (clocks or {}).get("slices", [])[:_CLOCKS_SHOWN]:
        offset, drift = entry["offset_ns"] / 1e3, entry["drift_ppm"]
        yield (
            f"clock {entry['slice']}",
            f"{offset:+.3f} us, {drift:+.3f} ppm, within {entry['error_ns'] / 1e3:.3f} us ({entry['ties']} ties)",
        )
    if clocks is None or "by_rank" not in clocks:
        return
    yield from _shared_rows(clocks.get("shared"))
    if clocks["drift_ppm"] is None and not any(clocks["by_rank"].values()):
        yield "clock", f"host time as measured: {clocks.get('reason', 'the repeated slice tells nothing')}"
        return
    moved = [drift for drift in clocks["by_rank"].values() if drift]
    if not clocks["applied"] and not moved:
        error = "of one rank" if clocks["error_ppm"] is None else f"+- {clocks['error_ppm']:.0f} ppm"
        yield "clock", f"host time as measured: a drift of {clocks['drift_ppm']:+.0f} ppm {error} is within the noise"
        return
    if moved:
        yield "clock", f"host time of {len(moved)} ranks brought by {min(moved):+.0f} to {max(moved):+.0f} ppm"


def _shared_rows(shared: Mapping[str, Any] | None) -> Iterable[tuple[str, str]]:
    """What collectives that several recordings took part in say about their clocks."""
    if not shared:
        return
    if not shared["ties"]:
        yield "ties", "none: no two ranks that ran share collectives by which their clocks can be compared"
        return
    ranks = sum(map(len, shared["ranks"]))
    what = "host time between" if shared["seen"] == ["starts"] else "ends of"
    yield (
        "ties",
        f"{shared['ties']} of {ranks} ranks by {what} shared collectives, {shared['residual_ns'] / 1e3:.3f} us apart; "
        f"{len(shared['applied'])} ranks brought by them",
    )


def _bootstrap_rows(bootstrap: Mapping[str, Any] | None) -> Iterable[tuple[str, str]]:
    """How long it took until ranks trained."""
    times = [spent for spent in (bootstrap or {}).get("rank_ns", {}).values() if spent is not None]
    if bootstrap is None or not times:
        return
    job = "" if bootstrap["job_ns"] is None else f"{_seconds(bootstrap['job_ns'])} until all ranks that ran trained; "
    yield "bootstrap", f"{job}a rank {_seconds(min(times))} to {_seconds(max(times))} from its start"


def _influence_rows(influence: Mapping[str, Any] | None) -> Iterable[tuple[str, str]]:
    """How far the iteration time moves when a recording is left out."""
    if influence is None:
        return
    if not influence["left_out"]:
        yield "error bar", "none: every recording is the only one of its kind (run more ranks: --verify, --ranks all)"
        return
    error, largest = influence["error_ppm"] / 1e4, influence["largest_ppm"] / 1e4
    rest = f", {influence['alone']} more are the only ones of their kind" if influence["alone"] else ""
    count = len(influence["left_out"])
    yield (
        "error bar",
        f"{error:.3f} % of the iteration time (at most {largest:.3f} %), {count} recordings left out{rest}",
    )


def part_text(document: Mapping[str, Any]) -> str:
    """What `prism collect --part` prints."""
    sizes = document["recordings"]
    rows = [
        ("part", f"{document['part']} of {document['world_size']} ranks"),
        ("ranks", f"{len(document['ranks_run'])}, {len(document['ranks_resumed'])} of them finished before"),
        *clock_rows(document.get("clocks")),
        ("kept in", f"{document['parts']} ({_mebibytes(sizes['disk_bytes'])})"),
        ("took", f"{_seconds(document['wall_ns'])}, largest rank {_mebibytes(document['peak_rank_rss_bytes'])}"),
        *(("note", note) for note in document["notes"]),
    ]
    return _table(rows)


def replay_text(document: Mapping[str, Any]) -> str:
    """What `prism replay` prints."""
    if document.get("level") == "message":
        return _message_replay_text(document)
    rows = [
        ("iteration time", _times(document["iteration_time_ns"])),
        ("ranks", f"{document['world_size']} in {document['rank_classes']} classes"),
        *_traffic_rows(document.get("traffic")),
        ("critical rank", str(document["critical_rank"])),
        ("ops", f"{document['ops']:,}, evaluated {document['ops_evaluated']:,}"),
        *((f"compute {name}", share) for name, share in _share_lines(_provenance(document))),
        *(("NCCL", f"{name}={value}") for name, value in document.get("nccl", {}).items()),
        *(("note", note) for note in document.get("notes", ())),
        ("took", f"{_seconds(document['wall_ns'])}, {_mebibytes(document['peak_rss_bytes'])}"),
    ]
    if failures := document.get("group_failures"):
        from prism_core.spare.text import replayed_text  # It is all of prism_core.spare.

        return _table(rows) + "\n\n" + replayed_text(failures)
    return _table(rows)


def _traffic_rows(traffic: Mapping[str, Any] | None) -> Iterable[tuple[str, str]]:
    if traffic is None:
        return
    alone = _times([traffic["total_time_alone_ns"]])
    yield "contention", f"{traffic['contention']}, {traffic['messages']:,} messages; {alone} without"
    if busiest := traffic.get("busiest_port"):
        yield "busiest port", f"{busiest['port']}: {_times([busiest['used_ns']])} of messages at full speed"
    if overlap := traffic.get("overlap"):
        share, added, source = overlap["stretched_ppm"] / 1e4, _times([overlap["added_ns"]]), overlap["provenance"]
        yield "overlap", f"{share:.1f}% of compute time slowed down, {added} added in all ({source} factors)"


def inspect_text(document: Mapping[str, Any]) -> str:
    """What `prism inspect` prints."""
    if document.get("level") == "message":
        return _message_program_text(document)
    rows = [
        ("ranks", str(document["world_size"])),
        ("ops", f"{document['ops']:,} in {_mebibytes(document['graph_bytes'])}"),
        *(("role", _role(role)) for role in document["roles"][:_SHOWN]),
        *(("communicators", _family(family)) for family in document["communicators"][:_SHOWN]),
        *_sandbox_rows(document),
        *((kind, f"{count:,}") for kind, count in document["ops_by_kind"].items()),
        *(_share_rows(document["device_time"]["by_provenance_ns"])),
        *((f"meta {name}", _first_line(value)) for name, value in document["meta"].items()),
    ]
    return _table(rows)


def _message_replay_text(document: Mapping[str, Any]) -> str:
    parameters = {name: "inf" if value is None else f"{value:g}" for name, value in document["loggops"].items()}
    rows = [
        ("total time", f"{_times(document['iteration_time_ns'])} ({document['total_ticks']:,} ticks)"),
        ("ranks", f"{document['world_size']}, message level"),
        ("critical rank", str(document["critical_rank"])),
        ("ops", f"{document['ops']:,}, {document['messages']:,} messages, {document['message_bytes']:,} bytes"),
        ("busiest NIC", f"{100 * document['max_nic_utilisation']:.1f} %"),
        ("LogGOPS", ", ".join(f"{name} {value}" for name, value in parameters.items())),
        ("took", f"{_seconds(document['wall_ns'])}, {_mebibytes(document['peak_rss_bytes'])}"),
    ]
    return _table(rows)


def _message_program_text(document: Mapping[str, Any]) -> str:
    fewest, most = document["ops_per_rank"]
    rows = [
        ("ranks", f"{document['world_size']}, message level"),
        ("ops", f"{document['ops']:,} in {_mebibytes(document['graph_bytes'])}, {fewest:,} to {most:,} per rank"),
        *((kind, f"{count:,}") for kind, count in document["ops_by_kind"].items()),
        ("bytes sent", f"{document['sent_bytes']:,}"),
        ("lanes", f"{document['cpu_lanes']} CPU, {document['nic_lanes']} NIC"),
    ]
    return _table(rows)


def _share_rows(shares: Mapping[str, float]) -> Iterable[tuple[str, str]]:
    return ((f"compute {name}", share) for name, share in _share_lines(shares))


def _role(role: Mapping[str, Any]) -> str:
    example = ", ".join(map(str, role["example_ranks"][:4]))
    return f"{role['ranks']} ranks ({example}, ...), {role['ops']:,} ops on {role['streams']} streams"


def _family(family: Mapping[str, Any]) -> str:
    stride = "" if family["stride"] is None else f", every {family['stride']}"
    return f"{family['count']} of {family['size']} ranks{stride}"


def _first_line(text: str) -> str:
    lines = text.splitlines()
    return lines[0] + (f" ... ({len(lines)} lines)" if len(lines) > 1 else "") if lines else ""


def emulate_text(document: Mapping[str, Any]) -> str:
    """What `prism emulate` prints."""
    return _table(_emulate_rows(document))


def _emulate_rows(document: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    yield "iteration time", _times(document["iteration_time_ns"])
    yield "ranks", f"{document['world_size']}, of which {document['ranks_materialised']} exchange data with the sandbox"
    yield from _sandbox_rows(document)
    for rank in document["ranks"]:
        yield from _rank_rows(rank)
    yield from job_rows(document.get("memory"))
    for what, text in job_rows(document.get("memory_collected")):
        yield f"{what}, when collected", text
    for note in document["notes"]:
        yield "note", note
    for note in document["store"]:
        yield "store", f"{note['rule']}: {note['key']}"
    if document["error"]:
        yield "error", document["error"]["message"]
    yield from _bootstrap_rows(document.get("bootstrap"))
    if "wall_ns" in document:
        overhead = "" if document["overhead"] is None else f", {document['overhead']} times the emulated time"
        yield "took", _seconds(document["wall_ns"]) + overhead


def _rank_rows(rank: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    name = f"rank {rank['rank']}"
    yield name, _times(rank["iteration_time_ns"])
    yield (
        f"{name} peak",
        f"allocated {_mebibytes(rank['peak_allocated_bytes'])}, reserved {_mebibytes(rank['peak_reserved_bytes'])}",
    )
    sizes = [comm["size"] for comm in rank["communicators"]]
    memory = device_memory(rank["peak_reserved_bytes"], sizes, modelled_bytes=rank["nccl_buffer_bytes"])
    for what, text in memory.lines():
        yield f"{name} memory, {what}", text
    if "memory" in rank:
        yield from rank_rows(name, rank["memory"])
    yield f"{name} NCCL init", f"{_seconds(rank['nccl_init_ns'])} modelled, in no iteration time"
    shares = ", ".join(f"{kind} {share}" for kind, share in _share_lines(rank["time_by_provenance"]))
    yield f"{name} time", shares or "none"
    yield from _work_rows(name, rank.get("compute_time_ns", {}))
    for comm in rank["communicators"]:
        yield f"{name} NCCL", f"{comm['calls']} calls, {_mebibytes(comm['bytes'])} among {comm['size']} ranks"
    yield from _value_rows(name, rank.get("values"))
    yield from _tier_rows(name, rank.get("tiers", ()))
    for call, count in rank["unsupported"].items():
        yield f"{name} unsupported", f"{call} ({count} times)"
    for note, count in rank["notes"].items():
        yield f"{name} note", f"{note} ({count} times)"


def _tier_rows(name: str, uses: Iterable[Mapping[str, Any]]) -> Iterable[tuple[str, str]]:
    """How the payloads of NCCL calls came about."""
    counts: dict[str, int] = {}
    for use in uses:
        counts[use["tier"]] = counts.get(use["tier"], 0) + use["count"]
    if counts:
        yield (
            f"{name} values",
            "payloads by tier: " + ", ".join(f"{count} {tier}" for tier, count in sorted(counts.items())),
        )


def _value_rows(name: str, values: Mapping[str, Any] | None) -> Iterable[tuple[str, str]]:
    """What the host read from the device, if anything, and where it was not known."""
    if values is None or not any(values[grade] for grade in GRADES):
        return
    yield f"{name} values read", ", ".join(f"{values[grade]:,} {grade}" for grade in GRADES)
    for grade in ("unknown", "provided"):
        sites = [site for site in values["sites"] if site["grade"] == grade]
        for site in sites[:_SHOWN]:
            yield f"{name} {grade}", site_text(site)
        if len(sites) > _SHOWN:
            yield f"{name} {grade}", f"{len(sites) - _SHOWN} more places"


def _work_rows(name: str, families: Mapping[str, Mapping[str, int]]) -> Iterable[tuple[str, str]]:
    """Device time of computing by what it is for, the largest first, and what it rests on."""
    totals = {family: sum(shares.values()) for family, shares in families.items()}
    everything = sum(totals.values())
    for family, total in sorted(totals.items(), key=lambda item: (-item[1], item[0])):
        if total:
            shares = ", ".join(f"{kind} {share}" for kind, share in _share_lines(families[family]))
            share = f"{100 * total / everything:.1f} %"
            yield f"{name} {family.replace('_', ' ')}", f"{share} of computing ({shares})"


def doctor_text(document: Mapping[str, Any]) -> str:
    """What `prism doctor` prints."""
    marks = {"ok": "ok ", "warning": "?? ", "error": "!! "}
    lines = [f"{marks[item['state']]}{item['name']}: {item['detail']}" for item in document["findings"]]
    verdict = "the preload is in place" if document["preload_in_place"] else "THE PRELOAD IS NOT IN PLACE"
    return "\n".join([*lines, verdict])
