"""An evaluation for people: `report.md` with its tables, and the plot beside it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import atomic_io, evaluation

# ----------------------------------------------------------------------------------------------------------
# report.md


def markdown(found: dict[str, Any], plot_name: str) -> str:
    """The report for people.

    Args:
        found: from `results`.
        plot_name: the plot's file name beside the report.
    """
    settings = ", ".join(f"{key} {value}" for key, value in found["settings"].items() if value is not None)
    files = dict.fromkeys(run["prompts"] for run in found["runs"])
    sections = [
        "# Acceptance and speed",
        f"Verifier: {found['verifier'].get('verifier')}. {settings[:1].upper()}{settings[1:]}.",
        *found["recommendation"]["text"],
        *(_file_section(name, found) for name in files),
        f"![Acceptance by position and speed-up]({plot_name})",
        _READING,
    ]
    return "\n\n".join(sections) + "\n"


_READING = """## How to read this

* Acceptance length: tokens that one step of the verifier yields, 1 + the sum of the acceptance by position,
  from vLLM's counters. Position k: share of drafts whose tokens 0..k were all accepted.
* In brackets: 95 % intervals, bootstrap over prompts. A difference whose interval holds 0 is called none.
* Speed-up: output tokens/s over the verifier's alone, on the same prompts with as many streams.
* Same output: answers equal to the verifier's alone, token by token. Drafting is lossless in exact
  arithmetic; in bfloat16, K + 1 tokens in one step round differently from one, and a near tie may then go the
  other way. The verifier's own row, against itself with fewer streams, shows how often that happens without
  any drafter. Gap: how far apart the verifier itself puts the two tokens; within rounding (a few tenths of a
  nat in bfloat16) it is a tie, beyond it something is wrong."""


def _file_section(prompts: str, found: dict[str, Any]) -> str:
    runs = [run for run in found["runs"] if run["prompts"] == prompts]
    domain = evaluation.DOMAIN[runs[0]["in_domain"]]
    pairs = [c for c in found["comparisons"] if c["prompts"] == prompts]
    drafted = [run for run in runs if run["drafter"] is not None]
    blocks = [
        f"## Prompts: {runs[0]['prompt_set']}",
        f"{runs[0]['prompts_answered']} prompts of `{prompts}`{domain and f', {domain}'}.",
        _main_table(runs),
    ]
    if drafted:
        blocks.append(_position_table(drafted))
    if pairs:
        blocks.append("\n".join(f"* {_pair(c)}: {evaluation.change(c)}." for c in pairs))
    for title, column in (("Source", "by_source"), ("Part", "by_part")):
        if any(len(run[column] or {}) > 1 for run in drafted):
            blocks.append(_group_table(title, column, drafted))
    return "\n\n".join([*blocks, *_difference_lines(runs)])


def _pair(comparison: dict[str, Any]) -> str:
    source = f", {comparison['source']} alone" if comparison["source"] is not None else ""
    return (
        f"{comparison['b']} against {comparison['a']} at K = {comparison['num_speculative_tokens']}{source}"
    )


def _main_table(runs: list[dict[str, Any]]) -> str:
    rows = [
        [
            *_who(run),
            _with_interval(run["acceptance_length"], run["acceptance_length_interval"]),
            f"{run['output_tokens_per_s']:.1f}",
            "-" if run["speed_up"] is None else f"{run['speed_up']:.2f}",
            _share_equal(run["same_output"]),
        ]
        for run in runs
    ]
    head = ["Drafter", "K", "Streams", "Acceptance length", "Output tokens/s", "Speed-up", "Same output"]
    return _table(head, rows)


def _position_table(runs: list[dict[str, Any]]) -> str:
    width = max(run["num_speculative_tokens"] for run in runs)
    rows = []
    for run in runs:
        shares = run["acceptance_by_position"]
        sure = run["acceptance_by_position_intervals"] or [None] * len(shares)
        cells = [_with_interval(share, pair) for share, pair in zip(shares, sure, strict=True)]
        rows.append([*_who(run), *cells, *[""] * (width - len(cells))])
    return _table(["Drafter", "K", "Streams", *(f"Position {k}" for k in range(width))], rows)


def _group_table(title: str, column: str, runs: list[dict[str, Any]]) -> str:
    rows = [
        [
            *_who(run),
            name,
            str(group["prompts"]),
            str(group["drafts"]),
            _with_interval(group["acceptance_length"], group["acceptance_length_interval"]),
        ]
        for run in runs
        for name, group in (run[column] or {}).items()
    ]
    return _table(["Drafter", "K", "Streams", title, "Prompts", "Drafts", "Acceptance length"], rows)


def _difference_lines(runs: list[dict[str, Any]]) -> list[str]:
    """One line for each first difference: drafters and K often part from the verifier at the same token."""
    alike: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for run in runs:
        same = run["same_output"]
        if same and same["first_difference"]:
            place = {**same["first_difference"], "gap": None}
            alike.setdefault((same["reference_concurrency"], *place.values()), []).append(run)
    return [_difference_line(group) for group in alike.values()]


def _difference_line(runs: list[dict[str, Any]]) -> str:
    same = runs[0]["same_output"]
    first = same["first_difference"]
    who = ", ".join("{} (K {}, {} streams)".format(*_who(run)) for run in runs)
    gaps = [run["same_output"]["first_difference"]["gap"] for run in runs]
    largest = [run["same_output"]["largest_gap"] for run in runs]
    apart = "" if None in gaps else f" ({max(gaps):.3f} nats apart)"
    widest = "" if None in largest else f" Largest gap: {max(largest):.3f} nats."
    where = f"prompt {first['id']}, turn {first['turn']}, token {first['token']}"
    return (
        f"First difference of {who} from the verifier with {same['reference_concurrency']}: {where}: "
        f"`{_inline(first['expected'])}` became `{_inline(first['found'])}`{apart}.{widest}"
    )


def _inline(text: str) -> str:
    return text.replace("`", "'").replace("\n", "\\n")


def _who(run: dict[str, Any]) -> list[str]:
    k = run["num_speculative_tokens"]
    return [run["drafter"] or "verifier alone", str(k) if k else "-", str(run["concurrency"])]


def _with_interval(value: float, interval: Sequence[float] | None) -> str:
    return f"{value:.3f}" + (f" [{interval[0]:.3f}, {interval[1]:.3f}]" if interval else "")


def _share_equal(same: dict[str, Any] | None) -> str:
    return "-" if same is None else f"{same['equal']} of {same['compared']}"


def _table(head: list[str], rows: list[list[str]]) -> str:
    columns = list(zip(head, *rows, strict=True))
    widths = [max(len(cell) for cell in column) for column in columns]
    lines = [head, ["-" * width for width in widths], *rows]
    return "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |"
        for line in lines
    )


# ----------------------------------------------------------------------------------------------------------
# Plot


def plot(found: dict[str, Any], path: Path) -> None:
    """Acceptance by position (above) and speed-up by concurrency (below), a column for each prompt file.

    Args:
        found: from `results`.
        path: the .png to write.
    """
    from matplotlib.figure import Figure

    files = list(dict.fromkeys(run["prompts"] for run in found["runs"]))
    figure = Figure(figsize=(5.0 * len(files), 7.5), layout="constrained")
    axes = figure.subplots(2, len(files), squeeze=False, sharey="row")
    for column, prompts in enumerate(files):
        measured = [run for run in found["runs"] if run["prompts"] == prompts]
        runs = [run for run in measured if run["drafter"] is not None]
        axes[0, column].set_title(f"prompts: {measured[0]['prompt_set']}", wrap=True)
        _plot_positions(axes[0, column], runs)
        _plot_speed_up(axes[1, column], runs)
    # Once, after all columns: a limit set earlier would end the shared autoscaling.
    axes[0, 0].set_ylim(bottom=0)
    with atomic_io.replacing(path, "wb") as file:
        figure.savefig(file, format="png", dpi=120)


def _plot_positions(axis: Any, runs: list[dict[str, Any]]) -> None:
    lowest = min((run["concurrency"] for run in runs), default=0)
    shown = [run for run in runs if run["concurrency"] == lowest]
    for place, run in enumerate(shown):
        shares = run["acceptance_by_position"]
        sure = run["acceptance_by_position_intervals"]
        # The percentile interval need not hold the value when few prompts are drawn.
        bars = sure and [
            [max(0.0, share - low) for share, (low, _) in zip(shares, sure, strict=True)],
            [max(0.0, high - share) for share, (_, high) in zip(shares, sure, strict=True)],
        ]
        name = f"{run['drafter']}, K={run['num_speculative_tokens']}: {run['acceptance_length']:.2f}"
        # Side by side: intervals drawn over one another cannot be told apart.
        aside = 0.05 * (place - (len(shown) - 1) / 2)
        positions = [position + aside for position in range(len(shares))]
        axis.errorbar(positions, shares, yerr=bars, marker="o", capsize=3, label=name)
    axis.set(xlabel="draft position", ylabel="accepted up to here (share of drafts)")
    axis.xaxis.get_major_locator().set_params(integer=True)
    if runs:
        axis.legend(title="acceptance length")


def _plot_speed_up(axis: Any, runs: list[dict[str, Any]]) -> None:
    """Lines over the numbers of streams; bars where there is only one, as one point makes no line."""
    timed = [run for run in runs if run["speed_up"] is not None]
    streams = sorted({run["concurrency"] for run in runs})
    if len(streams) > 1:
        for choice in dict.fromkeys(map(evaluation.choice, timed)):
            points = [
                (run["concurrency"], run["speed_up"]) for run in timed if evaluation.choice(run) == choice
            ]
            axis.plot(*zip(*points, strict=True), marker="o", label=f"{choice[0]}, K={choice[1]}")
        axis.set(xlabel="concurrent streams", xticks=streams)
    else:
        names = [f"{run['drafter']}\nK={run['num_speculative_tokens']}" for run in timed]
        for place, run in enumerate(timed):
            axis.bar(place, run["speed_up"], width=0.6)
        axis.set_xticks(range(len(names)), names, rotation=30 if len(names) > 5 else 0)
        axis.margins(y=0.25)  # room for the legend above the line of the verifier
        axis.set_xlabel(f"drafter ({streams[0]} concurrent streams)" if streams else "")
    axis.axhline(1.0, color="grey", linestyle="--", linewidth=1, label="verifier alone")
    axis.set_ylabel("speed-up (output tokens/s)")
    axis.legend()
