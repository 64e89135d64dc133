"""The command line of kvbm-kernels."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import click
from click.core import ParameterSource
from rich.console import Console

import kvbm_kernels as kk
from kvbm_kernels._starting import INTERRUPTED, finish, say
from kvbm_kernels.bench.models import MODELS
from kvbm_kernels.bench.outputs import check_output, write_output
from kvbm_kernels.cli import report, svg, terminal
from kvbm_kernels.cli.facts import reasons
from kvbm_kernels.cli.places import KINDS, Memory, Picture, Shown, Side
from kvbm_kernels.explanation import explain
from kvbm_kernels.layouts import BlockShape

_NAME = "kvbm-kernels"
# Where the made-up memory of the two sides starts: anywhere, and apart.
_SRC_START, _DST_START = 1 << 40, 1 << 50

# What the library counts with. Numbers without an end are none that Python prints.
_COUNT = click.IntRange(1, (1 << 63) - 1)


def run_command(arguments: Sequence[str]) -> int:
    """Run the command; its exit status. A usage error is one line on standard error, and status 2."""
    return finish(_NAME, lambda: _run(arguments))


def _run(arguments: Sequence[str]) -> int:
    try:
        return int(command.main(list(arguments), prog_name=_NAME, standalone_mode=False) or 0)
    except click.UsageError as error:
        path = error.ctx.command_path if error.ctx else _NAME
        say(f"{path}: error: {_sentence(error)}")
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        return INTERRUPTED


def _sentence(error: click.UsageError) -> str:
    """What is wrong, and what is allowed where click does not say."""
    if isinstance(error, click.NoSuchOption) and error.ctx is not None:
        options = [option for parameter in error.ctx.command.get_params(error.ctx) for option in parameter.opts]
        return f"no option {error.option_name}, expected {', '.join(o for o in options if o.startswith('--'))}"
    return " ".join(error.format_message().split())


class _Commands(click.Group):
    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError:
            expected = " or ".join(self.list_commands(ctx))
            raise click.UsageError(f"no command {args[0] or repr('')}, expected {expected}", ctx) from None


@click.group(
    cls=_Commands,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="""\b
Examples:
  kvbm-kernels info
  kvbm-kernels layout --nh 8 --nt 16 --hd 128 --from hnd
  kvbm-kernels COMMAND --help

\b
Completion, in ~/.bashrc (in ~/.zshrc, zsh_source):
  eval "$(_KVBM_KERNELS_COMPLETE=bash_source kvbm-kernels)"
in ~/.config/fish/completions/kvbm-kernels.fish:
  _KVBM_KERNELS_COMPLETE=fish_source kvbm-kernels | source
""",
)
@click.version_option(kk.__version__, message="%(prog)s %(version)s")
@click.pass_context
def command(context: click.Context) -> None:
    """See what the library is and has here, and what it does with a layout."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


@command.command(
    epilog="""\b
Examples:
  kvbm-kernels info                  put this in a bug report
  kvbm-kernels info --json | jq .devices
"""
)
@click.option("--json", "as_json", is_flag=True, help="The same as JSON, with null for what is not known.")
def info(as_json: bool) -> None:
    """Say what is installed and what it runs on.

    The library and how it was built, the CUDA driver, whether batches of copies can be handed to it, the GPUs with
    their link to the host, and the Python around them. It is what a bug report should carry. What cannot be found out
    is said with the reason.
    """
    click.echo(report.as_text(report.collect(), as_json=as_json))


@command.command(
    epilog="""\b
Layouts:
  nhd, hnd    block stacks: chunks of a layer, K or V, anywhere in memory,
              [nt, nh, hd] or [nh, nt, hd]
  layers      a tensor a layer, [nb, no, nt, nh, hd]
  packed      a tensor a layer, [nb, nt, nh, no, hd]: rows of K and V in turn
  operational_nhd, operational_hnd
              a buffer a block, [nl, no, nt, nh, hd] or [nl, no, nh, nt, hd]
  universal   a buffer a block, [nh, nl, no, nt, hd]: a range of heads is one
              slice

\b
Examples:
  kvbm-kernels layout                              each row by itself
  kvbm-kernels layout --from hnd                   all tokens of a head
  kvbm-kernels layout --hd 1 --to operational_hnd  rows too short for a GPU
  kvbm-kernels layout --model llama-3.1-8b --nt 16 --nb 64 --to-host
  kvbm-kernels layout --svg layout.svg             the same as a picture
"""
)
@click.option(
    "--model",
    type=click.Choice(list(MODELS)),
    metavar="NAME",
    help="nl, no, nh and hd of a model's cache, where not given, such as llama-3.1-8b. A wrong name lists all.",
)
@click.option("--nl", type=_COUNT, default=2, show_default=True, help="Layers.")
@click.option("--no", type=_COUNT, default=2, show_default=True, help="Outer chunks: 2 for K and V, 1 for MLA.")
@click.option("--nh", type=_COUNT, default=4, show_default=True, help="KV heads.")
@click.option("--nt", type=_COUNT, default=4, show_default=True, help="Tokens a block.")
@click.option("--hd", type=_COUNT, default=8, show_default=True, help="Elements of a row, the head dimension.")
@click.option(
    "--dtype", type=click.Choice([str(dtype) for dtype in kk.DType]), default="f16", show_default=True, help="Elements."
)
@click.option("--nb", type=_COUNT, default=1, show_default=True, help="Blocks in the copy; the first is drawn.")
@click.option(
    "--from", "source", type=click.Choice(list(KINDS)), default="nhd", show_default=True, help="What is read."
)
@click.option(
    "--to",
    "destination",
    type=click.Choice(list(KINDS)),
    default="universal",
    show_default=True,
    help="What is written.",
)
@click.option("--from-host", is_flag=True, help="A GPU reads from pinned host memory.")
@click.option("--to-host", is_flag=True, help="A GPU writes to pinned host memory.")
@click.option(
    "--svg",
    "svg_file",
    type=click.Path(dir_okay=False, allow_dash=True, path_type=Path),
    metavar="FILE",
    help="Draw to a .svg file; - is standard output.",
)
@click.option("--json", "as_json", is_flag=True, help="No drawing, but what the copy does and why, as JSON.")
@click.pass_context
def layout(
    context: click.Context,
    model: str | None,
    nl: int,
    no: int,
    nh: int,
    nt: int,
    hd: int,
    dtype: str,
    nb: int,
    source: str,
    destination: str,
    from_host: bool,
    to_host: bool,
    svg_file: Path | None,
    as_json: bool,
) -> None:
    """Draw which bytes of a conversion go where, and say what the library does about them.

    Both sides are drawn in the order of memory, a cell for a row, with the byte each line starts at. Below stands what
    the copy comes down to: segments (runs that are contiguous on both sides), the kernel and its grid on a GPU, the
    code and the threads on the host, and in words why. It is told by the library itself, and needs no GPU. Nothing is
    copied.
    """
    to_stdout = str(svg_file) == "-"
    if svg_file is not None and not to_stdout:
        if svg_file.suffix != ".svg":
            raise click.UsageError(f"--svg {svg_file}, expected a .svg file or -", context)
        try:
            check_output(svg_file)
        except ValueError as error:
            raise click.UsageError(f"--svg {error}", context) from None
    if to_stdout and as_json:
        raise click.UsageError("--svg - with --json, expected one of them on standard output", context)
    extents = {"nl": nl, "no": no, "nh": nh, "hd": hd}
    if model is not None:
        of_model = MODELS[model]
        named = {"nl": of_model.layers, "no": of_model.outer_dim, "nh": of_model.kv_heads, "hd": of_model.head_dim}
        given = {n for n in extents if context.get_parameter_source(n) is not ParameterSource.DEFAULT}
        extents.update((name, extent) for name, extent in named.items() if name not in given)
    try:
        shape = BlockShape(**extents, nt=nt, dtype=dtype)
        src = KINDS[source].make(shape, nb, Memory(_SRC_START))
        dst = KINDS[destination].make(shape, nb, Memory(_DST_START))
        found = explain(dst, src, src_on_host=from_host, dst_on_host=to_host)
    except kk.KvbmError as error:
        raise click.UsageError(str(error), context) from None

    def picture_of(shown: Shown) -> Picture:
        sides = Side(source, src, shown), Side(destination, dst, shown)
        return Picture(shape, shown, *sides, found.segment_nbytes)

    if svg_file is not None:
        drawing = svg.draw(svg.choose_picture(shape, picture_of), found, nb).encode()
        if to_stdout:
            click.echo(drawing, nl=False)
        else:
            write_output(svg_file, drawing)
    if as_json:
        copy = {"from": source, "to": destination, "nb": nb, **extents, "nt": nt, "dtype": dtype}
        click.echo(json.dumps({"copy": copy, **dataclasses.asdict(found), "why": reasons(found, shape)}, indent=2))
    elif svg_file is None:
        console = Console(soft_wrap=False)
        # As COLUMNS=0 has it.
        if console.width < 1:
            console.width = 80
        terminal.draw(console, terminal.choose_picture(shape, picture_of, console.width), found, nb)
