"""What a run's files may hold: the one place where they are checked, when written and when read.

Types, ranges and lengths; numbers are finite and not negative; texts are one printable line. A run
that passes can be drawn, and nothing in it is a path, a page or a command.
"""

from io import BytesIO
from pathlib import Path
from typing import Annotated, Literal, NotRequired

import pandas as pd
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    FailFast,
    Field,
    TypeAdapter,
    ValidationError,
    model_validator,
    with_config,
)
from typing_extensions import TypedDict

from zero1_helpers.measure.files import LONGEST, RunError

FORMAT = 1
STATES = ("params", "grads", "opt_state", "buckets")  # what data parallelism can shard or free
CATEGORIES = (*STATES, "counters", "activations", "temporaries", "other")
MEMORY_COLUMNS = ("time_us", "category", "delta")
MOST = 2**53  # of bytes, microseconds, parameters: exact in a float, too
MOST_RANKS = 10_000


def _printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError("must be printable, on one line")
    return text


Count = Annotated[int, Field(ge=0, le=MOST, strict=True)]
Integer = Annotated[int, Field(ge=-MOST, le=MOST, strict=True)]
Seconds = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False, strict=True)]
Text = Annotated[str, Field(max_length=LONGEST, strict=True), AfterValidator(_printable)]
Short = Annotated[Text, Field(max_length=200)]


class Part(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")


class Model(Part):
    name: Short
    parameters: Count
    tensors: Count
    dtype: Short
    source: Text


class Data(Part):
    name: Short
    source: Text
    examples: Count
    batch_size: Count
    tokens_per_batch: Count


class States(Part):
    params: Count
    grads: Count
    opt_state: Count


class Peaks(States):
    counters: Count
    buckets: Count
    peak: Count
    peak_states: Count


class Collective(Part):
    op: Short
    calls: Count
    bytes: Count
    bytes_sent: Count


class Record(Part):
    """run.json. Fields that are not named here are left out when it is read."""

    format: Literal[1]
    variant: Annotated[Short, Field(min_length=1)]
    title: Short
    preset: Short
    model: Model
    data: Data
    backend: Short
    device: Short
    hardware: Short
    world_size: Annotated[int, Field(ge=1, le=MOST_RANKS)]
    link: Short
    steps: Annotated[int, Field(ge=1, le=10**6)]
    seed: Annotated[int, Field(ge=0, lt=2**64)]
    date: Annotated[str, Field(pattern=r"^\d{4}-\d\d-\d\d$", max_length=10)]
    versions: Annotated[dict[Short, Short], Field(max_length=100)]
    losses: list[float]  # may be infinite or no number: so training goes, at times
    step_seconds: list[Seconds]
    memory: list[Peaks]
    predicted: list[States]
    collectives: Annotated[list[Collective], Field(max_length=100)]
    late_share: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = 0.0

    @model_validator(mode="after")
    def _lengths(self):
        lengths = {"step_seconds": self.steps, "memory": self.world_size}
        lengths |= {"predicted": self.world_size, "losses": self.steps if self.losses else 0}
        for name, wanted in lengths.items():
            if (found := len(getattr(self, name))) != wanted:
                raise ValueError(f"field {name} has {found} entries, not {wanted}")
        return self


STRICT = ConfigDict(strict=True, extra="forbid")


@with_config(STRICT)
class SpanArguments(TypedDict):
    stream: NotRequired[Annotated[int, Field(ge=0, lt=100_000)]]
    phase: NotRequired[Short]
    correlation: NotRequired[Integer]
    device: NotRequired[Integer]


@with_config(STRICT)
class Span(TypedDict):
    ph: Literal["X"]
    cat: Short
    name: Text
    pid: Count
    tid: Count
    ts: Count  # microseconds since the first event of any rank
    dur: Count
    args: SpanArguments


@with_config(STRICT)
class LabelArguments(TypedDict):
    name: Short


@with_config(STRICT)
class Label(TypedDict):
    ph: Literal["M"]
    name: Short
    pid: Count
    tid: Count
    args: LabelArguments


@with_config(STRICT)
class DistributedInfo(TypedDict):
    backend: Short
    rank: Count
    world_size: Count


@with_config(STRICT)
class Trace(TypedDict):
    """trace.rankN.json.gz, as `lanes.lane_view` makes it."""

    schemaVersion: NotRequired[Count]
    distributedInfo: DistributedInfo
    lane_view: NotRequired[bool]
    traceEvents: Annotated[
        list[Annotated[Span | Label, Field(discriminator="ph")]],
        FailFast(),
        Field(max_length=4_000_000),
    ]


TRACE = TypeAdapter(Trace)


def check_record(data: bytes, path: Path) -> dict:
    """run.json, checked. RunError names the first field that is wrong."""
    return _check(Record.model_validate_json, data, path).model_dump(exclude_unset=True)


def check_about(about: dict) -> None:
    """Those fields of run.json that a caller gives, before any time is spent on training."""
    for name, value in about.items():
        if field := Record.model_fields.get(name):
            kind = (
                Annotated[field.annotation, *field.metadata] if field.metadata else field.annotation
            )
            _check(TypeAdapter(kind).validate_python, value, Path("run.json"), name)


def check_trace(data: bytes, path: Path, rank: int, world_size: int | None = None) -> dict:
    """The trace of `rank`, checked: a lane view with kernels and steps. RunError otherwise."""
    trace = _check(TRACE.validate_json, data, path)
    for name, wanted in (("rank", rank), ("world_size", world_size)):
        if (found := trace["distributedInfo"][name]) != wanted and wanted is not None:
            raise RunError(f"{path}: field distributedInfo.{name} is {found}, not {wanted}")
    events = trace["traceEvents"]
    if not any("stream" in event["args"] for event in events):
        raise RunError(f"{path}: field traceEvents has no kernel on a stream: see lanes.lane_view")
    steps = [event["name"] for event in events if event["name"].startswith("ProfilerStep#")]
    if not steps or not all(name.partition("#")[2].isdecimal() for name in steps):
        raise RunError(
            f"{path}: field traceEvents has no ProfilerStep#N: torch.profiler marks "
            "steps only when it has a schedule"
        )
    return trace


def check_memory(data: bytes, path: Path) -> pd.DataFrame:
    """A memory timeline, checked: integers, known categories, time and sums that are not negative."""
    try:
        memory = pd.read_csv(BytesIO(data), encoding="utf-8")
    except (ValueError, OverflowError) as error:
        raise RunError(f"{path}: damaged, cannot be read ({_first_line(error)})") from None
    for name in MEMORY_COLUMNS:
        if name not in memory:
            raise RunError(f"{path}: field {name} (a column) is missing")
        if name != "category" and memory[name].dtype != "int64" and len(memory):
            raise RunError(f"{path}: field {name} must hold integers of at most 64 bits only")
    memory = memory[list(MEMORY_COLUMNS)]
    strange = set(memory["category"]) - set(CATEGORIES)
    if strange or not len(memory):
        found = ascii(sorted(map(str, strange)))[:100] if strange else "nothing"
        raise RunError(f"{path}: field category holds {found}; known are {', '.join(CATEGORIES)}")
    if not memory["time_us"].is_monotonic_increasing:
        raise RunError(f"{path}: field time_us must not go back in time")
    if memory["time_us"].iloc[0] < 0 or memory["time_us"].iloc[-1] > MOST:
        raise RunError(f"{path}: field time_us must be 0 to {MOST}")
    # As floats, which do not wrap around.
    alive = memory["delta"].astype(float).groupby(memory["category"]).cumsum()
    if alive.min() < 0 or alive.max() > MOST or memory["delta"].abs().max() > MOST:
        raise RunError(
            f"{path}: field delta must sum up to 0 to {MOST} bytes in each category, always"
        )
    return memory


def _check(validate, value, path: Path, inside: str = ""):
    try:
        return validate(value)
    except ValidationError as error:
        # `include_context` off: what a message is made of need not be shown twice
        first = error.errors(include_url=False, include_context=False)[0]
    if first["type"] == "json_invalid":
        raise RunError(f"{path}: damaged, cannot be read ({first['msg']})")
    field = _field((inside, *first["loc"]) if inside else first["loc"])
    if first["type"] == "missing":
        raise RunError(f"{path}: field {field} is missing")
    what = first["msg"].removeprefix("Value error, ").removeprefix("Input ")
    if first["type"] == "value_error" and not first["loc"]:
        raise RunError(f"{path}: {what}")
    shown = ascii(first["input"])
    raise RunError(f"{path}: field {field}: {what}, not {shown[:60] + '…' * (len(shown) > 60)}")


def _field(location: tuple) -> str:
    """("memory", 1, "peak") as memory[1].peak; the kind of an event, which pydantic adds, is left out."""
    text = ""
    for before, part in zip((None, *location), location, strict=False):
        if isinstance(part, int):
            text += f"[{part}]"
        elif not (isinstance(before, int) and part in ("X", "M")):
            text += f".{part}" if text else ascii(part)[1:-1][:60]
    return text or "(whole file)"


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)[:200]
