"""`zero1`, or `python -m zero1_helpers`: record | figures | report | view | export-trace | plan | doctor."""

import contextlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from zero1_helpers._groups import explained
from zero1_helpers.measure.arguments import Parser, WrongUse, amount, whole
from zero1_helpers.measure.files import one_printable_line
from zero1_helpers.measure.terminal import complain, flush, one_line, say, tolerate_any_terminal

# Before torch is imported: its libraries read these once.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
os.environ.setdefault("KINETO_LOG_LEVEL", "6")

INTERRUPTED = 130  # the shell's own status for what Ctrl-C has ended


def main(argv: list[str] | None = None) -> int:
    """The exit status: 0 all is done, 1 a rank or some runs failed, 2 nothing could be done."""
    tolerate_any_terminal()
    command = "zero1"
    try:
        args = parse(argv)
        command = f"zero1 {args.command}"
        status = args.run(args) or 0
        return status if flush() else 1
    except ModuleNotFoundError as error:
        complain(command, explained(error))
        return 2
    except KeyboardInterrupt:
        complain(command, "interrupted")
        return INTERRUPTED
    except WrongUse as error:
        complain(*error.args)
    except (ValueError, ArithmeticError, OSError) as error:
        strange = isinstance(error, OSError) and error.filename
        complain(command, f"{error.filename}: {error.strerror}" if strange else error)
    return 2


def parse(argv):
    parser = Parser(prog="zero1", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)

    record = commands.add_parser("record", help="train one variant under the profiler, write a run")
    record.add_argument("--variant", required=True, help="ddp, zero1, zero1-async, …")
    record.add_argument("--preset", default="small", help="tiny, small (default) or smollm2-360m")
    record.add_argument(
        "--ranks", type=whole(1, 1024), default=4, help="processes to start (default: %(default)s)"
    )
    record.add_argument(
        "--steps", type=whole(1, 10**6), default=4, help="steps to record (default: %(default)s)"
    )
    record.add_argument(
        "--batch-size",
        type=whole(1, 10**6),
        help="examples per rank and step (default: the preset's)",
    )
    record.add_argument(
        "--link",
        default="none",
        help="none, auto, a preset or a rate to emulate, as '100MB/s + 1ms' (default: none)",
    )
    record.add_argument(
        "--out", required=True, type=Path, help="folder of the run, replaced if it is one"
    )
    record.add_argument("--raw", action="store_true", help="keep the profiler's own traces, too")
    record.set_defaults(run=run_record)

    figures = commands.add_parser("figures", help="draw every figure from recorded runs")
    figures.add_argument("--runs", default=Path("traces"), type=Path)
    figures.add_argument("--out", default=Path("figures"), type=Path)
    figures.add_argument("--theme", default="both", help="light, dark or both (default)")
    figures.add_argument("--format", default="svg,png,html", help="any of %(default)s")
    figures.add_argument(
        "--only",
        default="*",
        metavar="GLOB",
        help="kinds (memory,comparison), presets, runs, or paths of figures",
    )
    figures.add_argument("--against", type=Path, help="a second set of runs, to compare with")
    figures.set_defaults(run=run_figures)

    report = commands.add_parser("report", help="every variant: predicted, measured, published")
    report.add_argument("--runs", default=Path("traces"), type=Path)
    report.set_defaults(run=run_report)

    view = commands.add_parser("view", help="the trace of a run in Perfetto, all ranks, offline")
    view.add_argument("folder", metavar="RUN", type=Path)
    view.add_argument("--port", type=whole(0, 65535), default=9001, help="default: %(default)s")
    view.add_argument("--no-browser", action="store_true", help="only print the address")
    view.set_defaults(run=run_view)

    export = commands.add_parser("export-trace", help="the traces of runs as pages to embed")
    export.add_argument("folder", metavar="RUN", type=Path, help="a run, or a folder of runs")
    export.add_argument("--html", required=True, action="store_true", help="one page per run")
    export.add_argument("--out", default=Path("figures"), type=Path)
    export.set_defaults(run=run_export_trace)

    plan = commands.add_parser("plan", help="memory, traffic and exposed communication, on paper")
    plan.add_argument(
        "--params", required=True, type=amount(1, 1e18), help="number of parameters, as 7.5e9"
    )
    plan.add_argument("--ranks", required=True, type=whole(1, 10**7))
    plan.add_argument(
        "--link", required=True, help="inside a node: a preset or a rate, as nvlink or 100GB/s"
    )
    plan.add_argument(
        "--between", help="between nodes, the same; without it all ranks share one node"
    )
    plan.add_argument(
        "--node", type=whole(1, 10**7), default=8, help="ranks of a node (default: %(default)s)"
    )
    plan.add_argument(
        "--recipe", default="mixed", help="mixed (default), bf16, fp32, mixed-fp32-grads"
    )
    plan.add_argument(
        "--tokens",
        type=amount(0, 1e15),
        default=8192,
        help="per rank and step (default: %(default)s)",
    )
    plan.add_argument(
        "--flops",
        type=amount(1, 1e30),
        default=4e14,
        help="a rank's, per second (default: 4e14, 40%% of an H100's bf16)",
    )
    plan.add_argument("--tensors", type=whole(1, 10**9), default=300, help="default: %(default)s")
    plan.set_defaults(run=run_plan)

    doctor = commands.add_parser("doctor", help="is this machine ready? one line for each question")
    doctor.set_defaults(run=run_doctor)
    return parser.parse_args(argv)


def run_record(args) -> int:
    """Start the ranks; or be one of them, when torchrun started this process."""
    from zero1_helpers.measure.link import parse_link
    from zero1_helpers.measure.meet import RankFailed, run_ranks, torchruns_group
    from zero1_helpers.measure.runs import new_files
    from zero1_helpers.memory_math import nbytes
    from zero1_helpers.training.record import record_on_link
    from zero1_helpers.training.variants import get_variant
    from zero1_helpers.training.workload import meta_smol_model

    get_variant(args.variant, args.preset)
    if args.link != "auto":
        parse_link(args.link)
    what = (args.variant, args.preset, args.steps, args.out, args.link, args.batch_size, args.raw)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        with torchruns_group():
            record_on_link(*what)
        return 0
    if (
        args.out.exists()
        and not (args.out / "run.json").exists()
        and set(args.out.iterdir()) - {new_files(args.out)}
    ):
        raise ValueError(f"{args.out} is not a run, and not empty; name another folder")
    args.out.mkdir(parents=True, exist_ok=True)
    threads = max(1, (os.cpu_count() or 1) // args.ranks)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    if nbytes(meta_smol_model(args.preset).parameters()) > 2**29:
        # glibc: give a freed gradient back to the system at once. Kept in the heap, the gaps
        # between blocks of the full-size model took as much memory again. It costs time.
        os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", str(1024 * 1024))
    try:
        run_ranks(record_on_link, args.ranks, *what, use_gpus=True)
    except RankFailed as error:
        complain("zero1 record", error)
        return 1
    except KeyboardInterrupt:
        shutil.rmtree(new_files(args.out), ignore_errors=True)
        raise
    return 0


def run_figures(args) -> int:
    from zero1_helpers.report.gallery import draw_all

    damaged = draw_all(
        args.runs,
        args.out,
        args.theme,
        args.format.split(","),
        args.only,
        args.against,
        jobs=os.cpu_count() or 1,
        progress=lambda line: say(one_printable_line(line)),
    )
    if damaged:
        complain("zero1 figures", f"{damaged} of the runs skipped, see above")
    return bool(damaged)


def run_view(args) -> int:
    from zero1_helpers.report.server import serve

    return for_each_run("zero1 view", [args.folder], lambda run: view(args, serve(run, args.port)))


def view(args, server) -> None:
    from zero1_helpers.report.server import opened_in_a_browser

    browser = contextlib.nullcontext() if args.no_browser else opened_in_a_browser(server.address)
    with server, contextlib.suppress(KeyboardInterrupt):
        say(
            f"{one_printable_line(str(args.folder))} in Perfetto (Ctrl-C ends it): {server.address}"
        )
        with browser:
            server.serve_forever()


def run_export_trace(args) -> int:
    from zero1_helpers.measure.files import write_atomic
    from zero1_helpers.measure.runs import run_folders, run_names
    from zero1_helpers.report.pages import trace_html

    names = run_names(run_folders(args.folder))

    def export(run):
        page = trace_html(run)
        path = args.out / names[run.folder] / "trace.html"
        write_atomic(path, page.encode())
        say(one_printable_line(str(path)))

    return for_each_run("zero1 export-trace", names, export)


def for_each_run(command: str, folders, work: Callable) -> int:
    """`work(run)` for each; a bad run is named and left out. The exit status: 1 if there was any."""
    from zero1_helpers.measure.files import RunError
    from zero1_helpers.measure.runs import load_run

    status = 0
    for folder in folders:
        try:
            work(load_run(folder))
        except (RunError, ArithmeticError, LookupError, TypeError) as error:
            reason = error if isinstance(error, RunError) else f"{folder}: {one_line(error)}"
            complain(command, f"skipped: {reason}")
            status = 1
    return status


def run_plan(args) -> int:
    from zero1_helpers.measure.link import parse_link
    from zero1_helpers.report.plan import WORLDS, Network, Workload, growth, plan, stages

    inside, between = parse_link(args.link), parse_link(args.between) if args.between else None
    if inside is None:
        raise ValueError("--link is not none: ranks need one")
    network = Network(inside, between, args.node)
    compute = 6 * args.params * args.tokens / args.flops
    work = Workload(args.params, compute, args.recipe, args.tensors)
    where = f"{inside} inside nodes of {args.node}, {between} between" if between else str(inside)
    say(f"On paper: {args.params:.3g} parameters, {args.recipe}, {args.ranks} ranks, {where}.")
    say(f"Compute is 6 FLOPs a parameter and token: {args.tokens:g} tokens in {compute:.3g} s.\n")
    worlds = sorted({*WORLDS, args.ranks} if between else {1, args.ranks})
    for title, frame, digits in (
        ("Model states, GB per rank", stages(args.params, args.recipe, args.ranks), 2),
        ("Variants, per rank and step", plan(work, args.ranks, network), 3),
        ("Non-compute time in % over the number of ranks", growth(work, network, worlds), 1),
    ):
        say(f"{title}\n{frame.round(digits).to_string()}\n")
    return 0


def run_report(args) -> int:
    from zero1_helpers.measure.runs import run_folders
    from zero1_helpers.report.tables import report, results_table

    sound = []

    def check(run):
        results_table([run])  # what a table asks of a run, this one has
        sound.append(run)

    status = for_each_run("zero1 report", run_folders(args.runs), check)
    say(report(sound))
    return status


def run_doctor(args) -> int:
    from zero1_helpers.ranks.doctor import doctor

    return not doctor()
