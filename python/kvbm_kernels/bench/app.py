"""The command line of kvbench."""

from __future__ import annotations

import os
import shlex
import sys
import textwrap
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import click

import kvbm_kernels as kk
from kvbm_kernels._starting import INTERRUPTED, advice, finish, of_extra, reason, say
from kvbm_kernels.bench import compare as comparison
from kvbm_kernels.bench.backends import ABBREVIATIONS, BACKENDS
from kvbm_kernels.bench.beside import KERNELS
from kvbm_kernels.bench.cases import DIRECTIONS
from kvbm_kernels.bench.measure import Effort
from kvbm_kernels.bench.models import DEFAULT, MODELS
from kvbm_kernels.bench.outputs import check_output, write_output
from kvbm_kernels.bench.patterns import PATTERNS, as_pattern
from kvbm_kernels.bench.results import BROKEN, as_json, as_rows, broken, read_json, read_saved
from kvbm_kernels.bench.run import Request, run_tests
from kvbm_kernels.bench.suites import SUITES
from kvbm_kernels.bench.table import Shown
from kvbm_kernels.dtypes import as_dtype
from kvbm_kernels.errors import KvbmError

T = TypeVar("T")
Callback = Callable[[click.Context, click.Parameter, str | None], Any]


def _by(parse: Callable[[str], Any]) -> Callback:
    """The callback of an option whose value ``parse`` understands or raises ValueError for."""

    def callback(_context: click.Context, _parameter: click.Parameter, value: str | None) -> Any:
        try:
            return None if value is None else parse(value)
        except ValueError as error:
            raise click.BadParameter(str(error)) from None

    return callback


def _list_of(parse: Callable[[str], Any]) -> Callback:
    """The same for a list with commas, each entry once."""
    return _by(lambda value: list(dict.fromkeys(parse(entry.strip()) for entry in value.split(","))))


def _count(text: str) -> int:
    # Python itself refuses to read very long ones, in other words.
    number = int(text) if text.isdecimal() and len(text) < 20 else 0
    if not 0 < number < 1 << 63:
        given = repr(text) if len(text) < 60 else f"{text[:20]}... of {len(text)} digits"
        raise ValueError(f"{given}, expected a whole number from 1 to 2**63 - 1, or several with commas")
    return number


def _texts(text: str) -> str:
    if not all(map(str.strip, text.split(","))):
        raise ValueError(f"{text!r}, expected a text, or several with commas")
    return text


def _one_of(choices: dict[str, Any], abbreviations: dict[str, str]) -> Callable[[str], str]:
    short: dict[str, list[str]] = {}
    for abbreviation, name in abbreviations.items():
        short.setdefault(name, []).append(abbreviation)
    listed = ", ".join(name + (f" (or {'/'.join(short[name])})" if name in short else "") for name in choices)

    def parse(text: str) -> str:
        name = abbreviations.get(text, text)
        if name not in choices:
            raise ValueError(f"{text!r}, expected {listed}")
        return name

    return parse


def _completing(names: Iterable[str]) -> Callable[[click.Context, click.Parameter, str], list[str]]:
    """What a shell offers for the last entry of a list with commas."""

    def complete(_context: click.Context, _parameter: click.Parameter, value: str) -> list[str]:
        before, comma, last = value.rpartition(",")
        return [f"{before}{comma}{name}" for name in names if name.startswith(last)]

    return complete


# What the library counts with. Numbers without an end are none that Python prints.
_MOST = (1 << 63) - 1
_COUNT = click.IntRange(1, _MOST)
_FILE = click.Path(dir_okay=False, path_type=Path)
_SAVED = click.Path(exists=True, dir_okay=False, path_type=Path)
_PLOT = "a .png or .svg file"

_EPILOG = """\b
Patterns are LAYOUT_to_LAYOUT:
  fc_to_fc (fc), lw_to_fc (lw), fc_to_lw, lw_to_lw
      bytes as they are: whole blocks (fc), or a piece for each layer, K and V (lw)
  nhd, hnd, operational, universal, packed, any two of them, such as nhd_to_universal
      conversions, which bring rows into another order; packed has K and V of a row side by side
Behind a name, _shuffled has the pieces anywhere in memory, and _pools an allocation for each
layer (and K and V) with the blocks anywhere in it. Without, they follow each other.

\b
Backends:
{backends}

\b
Models:
{models}

\b
Examples:
  kvbench --num-blocks=1,128 --tokens-per-block=16,64 --backend vectorized,batched --direction h2d
  kvbench --model llama-3.1-8b --pattern nhd_to_universal_pools --direction d2d,d2h --json out.json
  kvbench --direction h2d --pattern lw_to_fc_pools --beside gemm
  kvbench --suite conversion --plot conversion.png
  kvbench compare before.json after.json

\b
Completion, in ~/.bashrc (in ~/.zshrc, zsh_source):
  eval "$(_KVBENCH_COMPLETE=bash_source kvbench)"
in ~/.config/fish/completions/kvbench.fish:
  _KVBENCH_COMPLETE=fish_source kvbench | source

Standard output is CSV; everything else is on standard error.""".format(
    backends="\n".join(f"  {name:<13} {meaning}" for name, meaning in BACKENDS.items()),
    # A name is not to be broken at its hyphens.
    models=textwrap.fill(
        ", ".join(MODELS),
        100,
        initial_indent="  ",
        subsequent_indent="  ",
        break_on_hyphens=False,
        break_long_words=False,
    ),
)


@click.group(
    invoke_without_command=True,
    epilog=_EPILOG,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@click.version_option(kk.__version__, prog_name="kvbench")
@click.option(
    "--num-blocks",
    metavar="N,..",
    callback=_list_of(_count),
    default="1,8,32",
    show_default=True,
    help="Blocks in a batch.",
)
@click.option(
    "--tokens-per-block",
    metavar="N,..",
    callback=_list_of(_count),
    default="16",
    show_default=True,
    help="Tokens of a block.",
)
@click.option(
    "--backend",
    metavar="NAME,..",
    callback=_list_of(_one_of(BACKENDS, ABBREVIATIONS)),
    shell_complete=_completing(BACKENDS),
    default=None,
    help="How bytes are moved, see below.  [default: what the pattern and the direction have]",
)
@click.option(
    "--direction",
    metavar="h2d|d2h|d2d|h2h,..",
    callback=_list_of(_one_of(DIRECTIONS, {})),
    shell_complete=_completing(DIRECTIONS),
    default=None,
    help="From host (h) or device (d) to host or device.  [default: h2d,d2h,d2d with a GPU, h2h without]",
)
@click.option(
    "--pattern",
    metavar="NAME,..",
    callback=_list_of(as_pattern),
    shell_complete=_completing(PATTERNS),
    default="fc_to_fc,lw_to_fc",
    show_default=True,
    help="Layouts on both sides, see below.",
)
@click.option(
    "--warmup", type=click.IntRange(0, _MOST), default=10, show_default=True, help="Calls before the timed ones."
)
@click.option("--iters", type=_COUNT, default=100, show_default=True, help="Timed calls, at least.")
@click.option(
    "--model",
    metavar="NAME",
    callback=_by(_one_of(MODELS, {})),
    shell_complete=_completing(MODELS),
    help=f"Extents of a model's cache, see below.  [default: {DEFAULT}]",
)
@click.option("--layers", type=_COUNT, help="Instead of the model's.")
@click.option("--kv-heads", type=_COUNT, help="Instead of the model's; of one rank.")
@click.option("--head-dim", type=_COUNT, help="Instead of the model's.")
@click.option("--outer-dim", type=_COUNT, help="Instead of the model's: 2 for K and V, 1 for MLA.")
@click.option(
    "--dtype", metavar="NAME", callback=_by(as_dtype), help="bf16, f16, f32, fp8_e4m3, int8 and so on.  [default: bf16]"
)
@click.option(
    "--baseline",
    type=click.Choice(["copy", "permute"]),
    default=None,
    help="What runs beside: one plain copy, or the array library's own permutation.  [default: copy]",
)
@click.option("--max-sms", type=_COUNT, help="The most multiprocessors a conversion may use.")
@click.option("--beside", type=click.Choice(list(KERNELS)), help="Also run beside a compute kernel on the GPU.")
@click.option("--suite", type=click.Choice([*SUITES, "all"]), help="A table of the project's instead of a combination.")
@click.option(
    "--only",
    callback=_by(_texts),
    help="Of a suite, rows whose title or pattern has this text, or with commas one of several.",
)
@click.option("--library", type=click.Choice(["torch", "cupy"]), help="Whose CUDA memory.  [default: the first there]")
@click.option("--json", "json_file", type=_FILE, help="Write everything here too, samples and provenance included.")
@click.option("--plot", "plot_file", type=_FILE, help=f"Draw the results into {_PLOT}.")
@click.pass_context
def kvbench(ctx: click.Context, /, json_file: Path | None, plot_file: Path | None, **options: Any) -> int:
    """What transfers and conversions of KV-cache blocks cost on this machine.

    Each test is timed against a plain copy of the same bytes in the same run, and its bytes are checked: a wrong one
    makes the exit status 1. What cannot run here is WAIVED, with the reason.
    """
    given = {
        name: value
        for name, value in options.items()
        if ctx.get_parameter_source(name) is not click.core.ParameterSource.DEFAULT
    }
    if ctx.invoked_subcommand is not None:
        if given or json_file or plot_file:
            raise click.UsageError(f"options of a run in front of {ctx.invoked_subcommand}, expected none")
        return 0
    of_suite = {"suite", "only", "warmup", "iters", "library"}
    if options["suite"]:
        for name in given.keys() - of_suite:
            raise click.UsageError(f"--{name.replace('_', '-')} with --suite, expected only {_flags(of_suite)} with it")
    elif options["only"] is not None:
        raise click.UsageError("--only without --suite, expected both")
    files = [path for path in (json_file, plot_file) if path is not None]
    for i, path in enumerate(files):
        _check(path, *files[:i])
    draw = None if plot_file is None else _plotting(plot_file)
    try:
        request = Request.of(options)
    except KvbmError as error:
        raise click.UsageError(str(error)) from None
    command = shlex.join(["kvbench", *sys.argv[1:]])
    effort = Effort(options["warmup"], options["iters"])
    run, status = run_tests(request, effort, options["library"], command, keeps_on=bool(files))
    # Each by itself: what cannot be written takes nothing else along.
    if json_file is not None and not _wrote(write_output, json_file, as_json(run)):
        status = 1
    if draw is not None and plot_file is not None:
        rows = as_rows([result.as_dict() for result in run.results])
        if not rows:
            say(f"kvbench: nothing was measured, {plot_file} is not written")
        elif not _wrote(draw, rows, plot_file):
            status = 1
    return status


def _wrote(write: Callable[..., None], *arguments: Any) -> bool:
    try:
        write(*arguments)
    except OSError as error:
        say(f"kvbench: error: {reason(error)}")
        return False
    return True


@kvbench.command()
@click.argument("results", type=_SAVED)
@click.argument("image", type=_FILE)
def plot(results: Path, image: Path) -> int:
    """Draw RESULTS, the CSV or JSON of a run, into IMAGE, a .png or .svg file. Only JSON has the ceilings."""
    draw = _plotting(image)
    _check(image, results)
    rows = _read(results, read_saved).rows
    if not rows:
        raise click.UsageError(f"{results} has no measured test")
    draw(rows, image)
    return 0


@kvbench.command()
@click.argument("results", type=_SAVED)
def show(results: Path) -> int:
    """The table of RESULTS, the JSON of a run: every test with its baseline, and what has no figure."""
    run = _read(results, read_json)
    try:
        shown = Shown.of(run)
    except BROKEN as error:
        raise click.UsageError(str(broken(results, error, "JSON"))) from None
    shown.print()
    return 0


@kvbench.command()
@click.argument("before", type=_SAVED)
@click.argument("after", type=_SAVED)
def compare(before: Path, after: Path) -> int:
    """The bandwidth of AFTER over that of BEFORE, test by test; each is the CSV or JSON of a run.

    Only JSON tells the machine, and how far the samples of a test are from each other: what is no more than that is
    marked.
    """
    first, second = _read(before, read_saved), _read(after, read_saved)
    for path, saved in ((before, first), (after, second)):
        if not saved.rows:
            raise click.UsageError(f"{path} has no measured test")
    matched = comparison.match(first.rows, second.rows)
    if not matched.pairs:
        why = comparison.difference(first.rows, second.rows, str(before), str(after))
        raise click.UsageError(f"{before} and {after} have no test in common: {why}")
    comparison.show_facts(first, second, str(before), str(after))
    comparison.show(matched, str(before), str(after))
    return 0


def _check(path: Path, *others: Path) -> None:
    # Better now than when everything is measured.
    try:
        check_output(path, *others)
    except ValueError as error:
        raise click.UsageError(str(error)) from None


def _flags(names: set[str]) -> str:
    return ", ".join(f"--{name}" for name in sorted(names | {"json", "plot"}))


def _read(path: Path, reader: Callable[[Path], T]) -> T:
    try:
        return reader(path)
    except (OSError, ValueError) as error:
        raise click.UsageError(str(error)) from None


def _plotting(image: Path) -> Callable[[list[Any], Path], None]:
    """The function that draws, or an error before anything is measured."""
    if image.suffix not in (".png", ".svg"):
        raise click.UsageError(f"{image}, expected {_PLOT}")
    # For windows, of which there are none, and one that is unknown would be an error.
    os.environ.pop("MPLBACKEND", None)
    try:
        from kvbm_kernels.bench.plot import draw
    except ModuleNotFoundError as error:
        if not of_extra(error):
            raise
        raise click.UsageError(advice(error)) from None
    return draw


def run_command(arguments: list[str]) -> int:
    """Run the command line; its exit status. What is wrong with it takes one line."""
    return finish("kvbench", lambda: _run(arguments))


def _run(arguments: list[str]) -> int:
    try:
        return int(kvbench.main(arguments, prog_name="kvbench", standalone_mode=False) or 0)
    except click.ClickException as error:
        message = " ".join(error.format_message().split())
        if message.startswith("No such") and "mean" not in message:
            message += " kvbench --help lists what there is."
        say(f"kvbench: error: {message}")
        return 2
    except click.Abort:
        return INTERRUPTED
