"""What an evaluation measured, and what follows from it: measured runs become `results.json`.

`results.json` (schema 1; keys are only ever added):

* `verifier`: the facts of the verifier's manifest. `settings`: what all runs share.
* `start`: the drafter that the others are judged against (the first one named), null without drafters.
* `runs`: one entry for each drafter (null: the verifier alone, always first), prompt file, K and concurrency:
    * `drafter`, `drafter_path`, `drafter_fingerprint`, `prompts` (the file), `prompt_set` (the name that the
      report gives it), `in_domain` (null: unknown), `num_speculative_tokens` (0 for the verifier),
      `concurrency` (streams an endpoint).
    * `acceptance_length`, `acceptance_by_position`, `drafts`: from vLLM's counters.
    * `acceptance_length_interval`, `acceptance_by_position_intervals`: 95 %, bootstrap over prompts; null
      where the server does not tell acceptance by request.
    * `prompts_answered`, `prompts_refused`, `output_tokens`, `seconds` (wall), `output_tokens_per_s`.
    * `speed_up`: output tokens/s over the verifier's alone, same prompts, same concurrency; null where that
      was not measured.
    * `same_output`: answers compared token by token with the verifier alone (the verifier itself: with its
      lowest concurrency): `{reference_concurrency, compared, equal, share, largest_gap, first_difference}`,
      the last being null or `{id, turn, token, expected, found, gap}`. A gap is the difference of the
      verifier's log-probabilities of the two tokens, in nats; null where it was not asked.
    * `by_source`, `by_part` (thinking and answer): name -> `{prompts, drafts, acceptance_length,
      acceptance_length_interval, acceptance_by_position}`.
* `comparisons`: each pair of drafters on the same prompts, for a whole file (`source` null) and for each
  source: `{a, b, prompts, prompt_set, source, num_speculative_tokens, concurrency, compared, difference,
  interval, longer}`; `difference` is b's acceptance length minus a's, `longer` is null where the interval
  holds 0. `a` is the start, or of two others the one named later.
* `recommendation`: `{drafter, num_speculative_tokens, speed_up, text: [paragraphs]}`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import combinations, takewhile
from typing import Any

from common import acceptance
from common.acceptance import Acceptance, Intervals

SCHEMA = 1
DOMAIN = {True: "in domain", False: "out of domain", None: ""}
_SHOWN_TOKENS = 8
_NAMED_SOURCES = 3
Key = tuple[str | None, int, str, int]


@dataclass(frozen=True)
class Answer:
    """One prompt's answers, a turn each.

    Attributes:
        id: the prompt's.
        source: the prompt's.
        token_ids: generated ids of each turn.
        accepted_by_step: draft tokens accepted in each verification step of each turn; None where unknown.
        thinking: leading tokens of each turn that are thinking, its end marker included.
    """

    id: str
    source: str
    token_ids: list[list[int]]
    accepted_by_step: list[list[int]] | None = None
    thinking: list[int] = field(default_factory=list)

    def acceptance(self, k: int) -> Acceptance:
        """All turns together."""
        return acceptance.of_steps([count for turn in self.accepted_by_step or [] for count in turn], k)

    def parts(self, k: int) -> dict[str, Acceptance]:
        """Thinking and answer apart."""
        pairs = [
            acceptance.split_steps(steps, tokens)
            for steps, tokens in zip(self.accepted_by_step or [], self.thinking, strict=True)
        ]
        named = zip(("thinking", "answer"), zip(*pairs, strict=True), strict=True)
        return {
            name: acceptance.of_steps([count for turn in turns for count in turn], k) for name, turns in named
        }


@dataclass(frozen=True)
class Run:
    """One measurement: a drafter (or none) on one prompt file.

    Attributes:
        drafter: its name; None for the verifier alone.
        drafter_path: its folder.
        drafter_fingerprint: of that folder.
        prompts: the prompt file's name.
        in_domain: whether these are the prompts that 01 held out; None when that is unknown.
        num_speculative_tokens: K; 0 for the verifier alone.
        concurrency: streams an endpoint.
        drafts: counted by the server.
        accepted: counted by the server, by position.
        output_tokens: generated.
        seconds: wall time.
        refused: prompts that the server refused for good.
        answers: the rest.
        gaps: prompt id -> nats between the two tokens where its output parts from the reference's, by the
            verifier's own probabilities; near 0 is a tie that rounding decides.
    """

    drafter: str | None
    drafter_path: str | None
    drafter_fingerprint: str | None
    prompts: str
    in_domain: bool | None
    num_speculative_tokens: int
    concurrency: int
    drafts: int
    accepted: list[int]
    output_tokens: int
    seconds: float
    refused: int
    answers: list[Answer]
    gaps: dict[str, float] = field(default_factory=dict)

    @property
    def key(self) -> Key:
        """What tells two runs of one evaluation apart."""
        return self.drafter, self.num_speculative_tokens, self.prompts, self.concurrency

    @property
    def counted(self) -> Acceptance:
        """The server's counters."""
        return Acceptance(self.drafts, tuple(self.accepted))

    @property
    def tokens_per_s(self) -> float:
        """Output tokens a second of wall time."""
        return self.output_tokens / self.seconds

    @property
    def by_request(self) -> bool:
        """Whether the server told acceptance for each answer, which intervals and parts need."""
        return self.drafter is not None and all(a.accepted_by_step is not None for a in self.answers)

    def to_row(self) -> dict[str, Any]:
        """As a JSON object."""
        return asdict(self)

    @staticmethod
    def from_row(row: dict[str, Any]) -> Run:
        """Back from `to_row`."""
        return Run(**{**row, "answers": [Answer(**answer) for answer in row["answers"]]})


# ----------------------------------------------------------------------------------------------------------
# results.json


def results(
    runs: Iterable[Run],
    *,
    drafters: Sequence[str],
    verifier: dict[str, Any],
    settings: dict[str, Any],
    decode: Callable[[list[int]], str],
) -> dict[str, Any]:
    """Everything that `results.json` holds, as the module's docstring describes it.

    Args:
        runs: as measured, in any order.
        drafters: names in the order of the table; the first is the start.
        verifier: facts.
        settings: what all runs share.
        decode: token ids -> text, for the first difference.
    """
    ordered = _ordered(list(runs), drafters)
    sets = prompt_sets(ordered)
    names = list(dict.fromkeys(run.drafter for run in ordered if run.drafter is not None))
    found = {
        "schema": SCHEMA,
        "verifier": verifier,
        "settings": settings,
        "start": names[0] if names else None,
        "runs": [{**_summary(run, ordered, decode), "prompt_set": sets[run.prompts]} for run in ordered],
        "comparisons": [
            {**pair, "prompt_set": sets[pair["prompts"]]} for pair in _comparisons(ordered, names[:1])
        ],
    }
    return {**found, "recommendation": _recommendation(found)}


def prompt_sets(runs: Iterable[Run]) -> dict[str, str]:
    """What each prompt file is called: by what it asks, as its path may hold the name of a drafter.

    Args:
        runs: all of an evaluation.

    Returns:
        File -> its sources, "math + code"; with the file where two files have the same ones.
    """
    sources: dict[str, dict[str, None]] = {}
    for run in runs:
        sources.setdefault(run.prompts, {}).update(dict.fromkeys(answer.source for answer in run.answers))
    named = {file: _joined(list(found)) for file, found in sources.items()}
    times = Counter(named.values())
    return {file: name if times[name] == 1 else f"{name} from {file}" for file, name in named.items()}


def _joined(sources: list[str]) -> str:
    more = len(sources) - _NAMED_SOURCES
    return " + ".join([*sources[:_NAMED_SOURCES], *([f"{more} more"] if more > 0 else [])])


def _ordered(runs: list[Run], drafters: Sequence[str]) -> list[Run]:
    """Prompt files as first measured; in each, the verifier first and then the drafters as named."""
    files = list(dict.fromkeys(run.prompts for run in runs))
    names = list(dict.fromkeys([*drafters, *(run.drafter for run in runs if run.drafter is not None)]))

    def place(run: Run) -> tuple[int, int, int, int]:
        rank = -1 if run.drafter is None else names.index(run.drafter)
        return rank, files.index(run.prompts), run.num_speculative_tokens, run.concurrency

    return sorted(runs, key=place)


def _summary(run: Run, runs: list[Run], decode: Callable[[list[int]], str]) -> dict[str, Any]:
    alone = [r for r in runs if (r.drafter, r.prompts, r.concurrency) == (None, run.prompts, run.concurrency)]
    k = run.num_speculative_tokens
    sources = list(dict.fromkeys(answer.source for answer in run.answers))
    sure = acceptance.intervals([answer.acceptance(k) for answer in run.answers]) if run.by_request else None
    return {
        "drafter": run.drafter,
        "drafter_path": run.drafter_path,
        "drafter_fingerprint": run.drafter_fingerprint,
        "prompts": run.prompts,
        "in_domain": run.in_domain,
        "num_speculative_tokens": k,
        "concurrency": run.concurrency,
        "acceptance_length": run.counted.length,
        "acceptance_length_interval": _length_interval(sure),
        "acceptance_by_position": run.counted.by_position,
        "acceptance_by_position_intervals": [list(pair) for pair in sure.by_position] if sure else None,
        "drafts": run.drafts,
        "prompts_answered": len(run.answers),
        "prompts_refused": run.refused,
        "output_tokens": run.output_tokens,
        "seconds": run.seconds,
        "output_tokens_per_s": run.tokens_per_s,
        "speed_up": run.tokens_per_s / alone[0].tokens_per_s if alone else None,
        "same_output": _same_output(run, runs, decode),
        "by_source": {
            source: _group([a.acceptance(k) for a in run.answers if a.source == source]) for source in sources
        }
        if run.by_request
        else None,
        "by_part": _by_part(run),
    }


def _length_interval(sure: Intervals | None) -> list[float] | None:
    return list(sure.length) if sure else None


def _group(prompts: list[Acceptance]) -> dict[str, Any]:
    together = acceptance.total(prompts)
    return {
        "prompts": len(prompts),
        "drafts": together.drafts,
        "acceptance_length": together.length,
        "acceptance_length_interval": _length_interval(acceptance.intervals(prompts)),
        "acceptance_by_position": together.by_position,
    }


def _by_part(run: Run) -> dict[str, Any] | None:
    if not run.by_request or not any(any(answer.thinking) for answer in run.answers):
        return None
    parts = [answer.parts(run.num_speculative_tokens) for answer in run.answers]
    return {name: _group([part[name] for part in parts]) for name in ("thinking", "answer")}


def reference(runs: Iterable[Run], drafter: str | None, prompts: str, concurrency: int) -> Run | None:
    """The run whose outputs a run's are compared with: the verifier alone, as many streams.

    The verifier itself is compared with its own lowest concurrency: another number of streams is enough for
    another rounding, and this shows how often that changes an answer without any drafter.
    """
    alone = [run for run in runs if run.drafter is None and run.prompts == prompts]
    if drafter is not None:
        return next((run for run in alone if run.concurrency == concurrency), None)
    fewer = [run for run in alone if run.concurrency < concurrency]
    return min(fewer, key=lambda run: run.concurrency, default=None)


def first_differences(wanted: Run, answers: Iterable[Answer]) -> Iterator[tuple[Answer, Answer, int, int]]:
    """Where answers part from a reference.

    Args:
        wanted: the reference.
        answers: prompts that it does not have are passed over.

    Yields:
        The reference's answer, the other one, the turn and the token of the first difference.
    """
    expected = {answer.id: answer for answer in wanted.answers}
    for found in answers:
        turns = (
            zip(expected[found.id].token_ids, found.token_ids, strict=False) if found.id in expected else ()
        )
        for turn, (left, right) in enumerate(turns):
            if left != right:
                alike = takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False))
                yield expected[found.id], found, turn, sum(1 for _ in alike)
                break


def _same_output(run: Run, runs: list[Run], decode: Callable[[list[int]], str]) -> dict[str, Any] | None:
    wanted = reference(runs, run.drafter, run.prompts, run.concurrency)
    if wanted is None:
        return None
    compared = len({answer.id for answer in wanted.answers} & {answer.id for answer in run.answers})
    different = list(first_differences(wanted, run.answers))
    return {
        "reference_concurrency": wanted.concurrency,
        "compared": compared,
        "equal": compared - len(different),
        "share": 1 - len(different) / compared if compared else None,
        "largest_gap": max(run.gaps.values()) if different and run.gaps else None,
        "first_difference": _shown(*different[0], run.gaps, decode) if different else None,
    }


def _shown(
    wanted: Answer,
    found: Answer,
    turn: int,
    token: int,
    gaps: dict[str, float],
    decode: Callable[[list[int]], str],
) -> dict[str, Any]:
    following = slice(token, token + _SHOWN_TOKENS)
    return {
        "id": wanted.id,
        "turn": turn,
        "token": token,
        "expected": decode(wanted.token_ids[turn][following]),
        "found": decode(found.token_ids[turn][following]),
        "gap": gaps.get(wanted.id),
    }


def _comparisons(runs: list[Run], start: list[str]) -> list[dict[str, Any]]:
    """Each pair of drafters at the lowest concurrency that both have: it does not change acceptance."""
    found = []
    pairs: dict[tuple[str | None, str | None, str, int], tuple[Run, Run]] = {}
    # Runs of a drafter ascend in concurrency, so the first pair that is found has the lowest.
    for a, b in combinations([run for run in runs if run.by_request], 2):
        same = (a.prompts, a.num_speculative_tokens, a.concurrency)
        if a.drafter != b.drafter and same == (b.prompts, b.num_speculative_tokens, b.concurrency):
            pairs.setdefault((a.drafter, b.drafter, *same[:2]), (a, b))
    for earlier, later in pairs.values():
        a, b = (earlier, later) if earlier.drafter in start else (later, earlier)
        sources = list(dict.fromkeys(answer.source for answer in a.answers))
        for source in [None, *sources] if len(sources) > 1 else [None]:
            found.append(_comparison(a, b, source))
    return [comparison for comparison in found if comparison is not None]


def _comparison(a: Run, b: Run, source: str | None) -> dict[str, Any] | None:
    k = a.num_speculative_tokens
    theirs = {answer.id: answer for answer in b.answers}
    pairs = [
        (answer.acceptance(k), theirs[answer.id].acceptance(k))
        for answer in a.answers
        if answer.id in theirs and source in (None, answer.source)
    ]
    found = acceptance.difference([left for left, _ in pairs], [right for _, right in pairs])
    if found is None:
        return None
    return {
        "a": a.drafter,
        "b": b.drafter,
        "prompts": a.prompts,
        "source": source,
        "num_speculative_tokens": k,
        "concurrency": a.concurrency,
        "compared": len(pairs),
        "difference": found.value,
        "interval": list(found.interval),
        "longer": {1: b.drafter, -1: a.drafter, 0: None}[found.sign],
    }


# ----------------------------------------------------------------------------------------------------------
# Recommendation


def _recommendation(found: dict[str, Any]) -> dict[str, Any]:
    drafted = [run for run in found["runs"] if run["drafter"] is not None]
    if not drafted:
        return {"drafter": None, "num_speculative_tokens": None, "speed_up": None, "text": []}
    timed = all(run["speed_up"] is not None for run in drafted)
    column = "speed_up" if timed else "acceptance_length"
    choices = dict.fromkeys(choice(run) for run in drafted)
    scores = {pair: _mean([run[column] for run in drafted if choice(run) == pair]) for pair in choices}
    best = max(scores, key=lambda pair: scores[pair])
    others = [name for name in dict.fromkeys(name for name, _ in choices) if name != found["start"]]
    return {
        "drafter": best[0],
        "num_speculative_tokens": best[1],
        "speed_up": scores[best] if timed else None,
        "text": [
            _on_speed(best, scores[best]) if timed else _on_length(best, scores[best]),
            *_on_drafters(others, found),
        ],
    }


def choice(run: dict[str, Any]) -> tuple[str, int]:
    """What a user chooses between: drafter and K."""
    return run["drafter"], run["num_speculative_tokens"]


def _mean(ratios: list[float]) -> float:
    """Geometric, as ratios want it."""
    return math.exp(sum(math.log(ratio) for ratio in ratios) / len(ratios))


def _on_speed(best: tuple[str, int], speed_up: float) -> str:
    name, k = best
    if speed_up > 1:
        return (
            f"**Fastest: {name} with K = {k}**, {speed_up:.2f} times the verifier alone (geometric mean over "
            "prompt files and concurrencies)."
        )
    return (
        f"**No drafter beats the verifier alone on this machine**: the best, {name} with K = {k}, reaches "
        f"{speed_up:.2f} times its tokens/s. Where verifying K + 1 tokens costs nearly K + 1 steps (a CPU, "
        "or a GPU with many streams) drafting cannot pay. Judge drafters by acceptance length here, and "
        "speed where they will serve."
    )


def _on_length(best: tuple[str, int], length: float) -> str:
    name, k = best
    return (
        f"**Longest acceptance: {name} with K = {k}**, {length:.3f}. Nothing is said about speed: the "
        "verifier alone was not measured beside every row. Run this again without --drafter and with "
        "--endpoint on a server that has none; its rows join these."
    )


def _on_drafters(others: list[str], found: dict[str, Any]) -> Iterator[str]:
    """Each against the start, and against those named after it where they were compared."""
    compared = {(c["b"], c["a"]) for c in found["comparisons"]}
    for place, name in enumerate(others):
        yield _on_drafter(name, found["start"], found)
        for later in others[place + 1 :]:
            if (name, later) in compared:
                yield _on_drafter(name, later, found)


def _on_drafter(name: str, against: str, found: dict[str, Any]) -> str:
    """Where `name` is accepted longer than another drafter, and where less."""
    pairs = [c for c in found["comparisons"] if (c["a"], c["b"]) == (against, name)]
    whole = {(c["prompts"], c["num_speculative_tokens"]): c["longer"] for c in pairs if c["source"] is None}
    if not pairs:
        return (
            f"**{name} against {against}:** not compared. They were not measured with the same prompts, K "
            "and concurrency, or the server did not tell acceptance by request."
        )
    # A source is worth a word where it goes another way than its file as a whole.
    told = [
        c
        for c in pairs
        if c["source"] is None or c["longer"] not in (None, whole[c["prompts"], c["num_speculative_tokens"]])
    ]
    domain = {run["prompts"]: DOMAIN[run["in_domain"]] for run in found["runs"]}

    def places(longer: str | None) -> str:
        return "; ".join(_seen(c, domain[c["prompts"]]) for c in told if c["longer"] == longer)

    lines = [
        f"**{name} against {against}**, acceptance length:\n",
        f"* gained: {places(name) or 'nowhere'}",
        f"* lost: {places(against) or 'nowhere beyond the interval'}",
        *([f"* no difference: {places(None)}"] if places(None) else []),
    ]
    return "\n".join(lines)


def _seen(comparison: dict[str, Any], domain: str) -> str:
    part, whole = comparison["source"], comparison["prompt_set"]
    low, high = comparison["interval"]
    conditions = [domain, f"K = {comparison['num_speculative_tokens']}", f"95 % {low:+.3f} to {high:+.3f}"]
    return (
        f"{whole if part is None else f'{part} alone (of {whole})'} {comparison['difference']:+.3f} "
        f"({', '.join(filter(None, conditions))})"
    )


def change(comparison: dict[str, Any]) -> str:
    """What the comparison found."""
    low, high = comparison["interval"]
    verdict = "no difference" if comparison["longer"] is None else f"{comparison['longer']} is longer"
    return f"{verdict} ({comparison['difference']:+.3f}, 95 % {low:+.3f} to {high:+.3f})"
