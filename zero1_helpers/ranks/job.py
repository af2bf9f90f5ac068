"""One request to some ranks, as a machine of states with one deadline.

    RUNNING   until all ranks have answered
      | a rank fails or dies                    | the stop button, or the time limit
      v                                         |
    FAILING   the others get the grace period   |
      v                                         v
    LOOKING   what is each rank doing? Those that can say it do
      v
    STOPPING  KeyboardInterrupt in those that still run
      v
    DONE      who has not answered by now is stuck, and all ranks are ended

Each state but DONE has a deadline; DONE is also reached as soon as every rank has answered.
"""

import enum
import math
import time

from zero1_helpers.ranks.output import alike, indented, span

LOOK = 0.5  # seconds in which a rank has to say what it does
MERCY = 0.7  # seconds from KeyboardInterrupt to the end, after a grace period
LONGEST_MERCY = 2.5  # and after the stop button, when there was no grace period

State = enum.Enum("State", "RUNNING FAILING LOOKING STOPPING DONE")


class Job:
    """A request, until each of its ranks has answered, has died, or is stuck.

    number: of the request.  ranks: Rank objects.  grace, limit: seconds; limit 0 is none.
    answers: {rank: dict}, in the order they came; a dict has "error", "died" or "stuck" if it failed.
    """

    def __init__(self, number: int, ranks: list, grace: float, limit: float = 0.0):
        self.number, self.ranks, self.grace = number, ranks, grace
        self.answers: dict[int, dict] = {}
        self.late: dict[int, dict] = {}  # {rank: {"late": where}}, when a cell ended before the job
        self.began = time.monotonic()
        self.state, self.limit = State.RUNNING, limit
        self.deadline = self.began + limit if limit else math.inf
        self.failed_at = math.inf  # when the first rank failed
        self.interrupts = 0  # how often the stop button was pressed
        self.why, self.report = (
            "",
            "",
        )  # of a request that was stopped: why, and what the ranks did then

    @property
    def pending(self) -> list:
        return [rank for rank in self.ranks if rank.number not in self.answers]

    def advance(self, now: float) -> None:
        """Take what the ranks have answered; go on to the next state if it is time."""
        for rank in self.pending:
            if answer := rank.answer_to(self.number):
                self.answers[rank.number] = answer
                if self.failed_at == math.inf and answer.keys() & {"error", "died"}:
                    self.failed_at = now
        if not self.pending:
            self._report()
            self.state = State.DONE
        elif self.interrupts and not self.why:
            self._stop("Interrupted", now)
        elif self.interrupts > 1:  # the second time, nothing is waited for
            self._give_up()
        elif self.state is State.RUNNING and self.failed_at < math.inf:
            died = any("died" in answer for answer in self.answers.values())
            self._enter(State.FAILING, now + (min(self.grace, 1.0) if died else self.grace))
        elif now >= self.deadline or (self.state is State.LOOKING and self._all_seen()):
            self._expire(now)

    def _expire(self, now: float) -> None:
        """The deadline of this state has come."""
        if self.state is State.RUNNING:
            self._stop(f"Time limit of {self.limit:g} s reached", now)
        elif self.state is State.FAILING:
            self._look(now)
        elif self.state is State.LOOKING:
            self._report()
            for rank in self.pending:
                rank.interrupt()
            if any(rank.pid is None for rank in self.pending):  # it has not even started
                return self._give_up()
            mercy = max(MERCY, min(self.grace, LONGEST_MERCY)) if self.why else MERCY
            self._enter(State.STOPPING, now + mercy)
        else:
            self._give_up()

    def _enter(self, state: State, deadline: float) -> None:
        self.state, self.deadline = state, deadline

    def _stop(self, why: str, now: float) -> None:
        self.why = f"{why} after {now - self.began:.0f} s, when the ranks were:"
        if self.state in (State.RUNNING, State.FAILING):
            self._look(now)

    def _look(self, now: float) -> None:
        self.looked_at = now
        for rank in self.ranks:
            rank.look()
        self._enter(State.LOOKING, now + LOOK)

    def _all_seen(self) -> bool:
        return all(rank.seen >= self.looked_at or rank.ended for rank in self.ranks)

    def _report(self) -> None:
        """Note what the ranks did when they were stopped, once."""
        if self.why and not self.report:
            self.report = self.why
            states = [rank.doing(self.looked_at) for rank in self.ranks]
            for who, (where, stack) in alike(
                [rank.number for rank in self.ranks],
                [(s["where"], s.get("stack", "")) for s in states],
            ):
                self.report += f"\n{span(who)}: {where}{indented(stack)}"

    def _give_up(self) -> None:
        self._report()
        for rank in self.pending:
            self.answers[rank.number] = {"stuck": rank.doing(self.looked_at)["where"]}
        self.state = State.DONE
