"""From the answers of the ranks to one error message: the likely cause in full, the rest in a line each."""

import re

from zero1_helpers.ranks.arguments import ClusterError
from zero1_helpers.ranks.output import span

FAILURES = ("died", "error", "stuck", "late")  # what an answer may have, most telling first


def check(job, channel) -> None:
    """Raise ClusterError if a rank failed in this job of this channel."""
    answers = job.answers | job.late
    failures = group(answers)
    if not failures:
        if channel.lost and len(job.answers) < len(job.ranks):
            channel.check_alive()
        return
    parts = [job.report] if job.report else []
    for kind, ranks in failures:
        answer = answers[ranks[0]]
        if kind == "died":
            tail = channel.ranks[ranks[0]].log_tail() or channel.parent.log_tail()
            parts.append(f"{span(ranks)} died: {answer['died']}{tail}")
        elif kind == "error":
            parts.append(describe_error(ranks, answer["error"], full=not parts))
        elif kind == "stuck":
            parts.append(f"{span(ranks)} did not stop and had to be ended: {answer['stuck']}")
        elif not channel.lost:
            parts.append(
                f"{span(ranks)} did not finish: {answer['late']}. Ended {job.grace:g} s after "
                "the failure, unless done by then; after that, %dist_init starts afresh."
            )
    if channel.lost:
        parts.append("All ranks are ended now: %dist_init starts afresh.")
    raise ClusterError("\n".join(parts))


def group(answers: dict[int, dict]) -> list[tuple[str, list[int]]]:
    """The kinds of failure, most telling first, each with the ranks that failed alike."""
    failures: dict = {}  # answers came in order of time, so the first error is likely the cause
    for rank, answer in answers.items():
        for kind in answer.keys() & set(FAILURES):
            failure = answer[kind]
            if kind == "error":  # alike but for numbers: gloo's messages name ports
                failure = (
                    failure["name"],
                    failure["place"],
                    re.sub(r"\d+", "#", failure["message"]),
                )
            failures.setdefault((kind, failure), []).append(rank)
    found = [(kind, ranks) for (kind, _), ranks in failures.items()]
    return sorted(found, key=lambda failure: FAILURES.index(failure[0]))


def describe_error(ranks, error: dict[str, str], full: bool) -> str:
    """An exception on these ranks: with its traceback, or in one line."""
    text = f"{span(ranks)}: {': '.join(filter(None, [error['name'], error['message']]))}"
    text = text if full else text.split("\n")[0][:200]
    text += f" ({error['place']}: {error['source']})" if error["place"] else ""
    return f"{text}\n{error['traceback'].rstrip()}" if full else text
