"""A run: what was asked for, made into tests, measured one after the other, and written down."""

from __future__ import annotations

import contextlib
import datetime
import functools
import platform
import signal
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import kvbm_kernels as kk
from kvbm_kernels._starting import INTERRUPTED
from kvbm_kernels.bench.cases import Case, combinations
from kvbm_kernels.bench.machine import HostMachine, Machine, cuda_machine
from kvbm_kernels.bench.measure import Bench, Effort
from kvbm_kernels.bench.models import DEFAULT, MODELS
from kvbm_kernels.bench.report import Report
from kvbm_kernels.bench.results import Result, Run, built
from kvbm_kernels.bench.suites import suite
from kvbm_kernels.dtypes import DType
from kvbm_kernels.errors import KvbmValueError
from kvbm_kernels.layouts import BlockShape


@dataclass(frozen=True)
class Request:
    """The tests of a run, and how the banner describes them."""

    cases: list[Case]
    banner: list[str]
    settings: dict[str, Any]
    """The options that ask for the same tests, by their names."""

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Request:
        """From the options of the command line. Raises KvbmError for a cache that no address space holds."""
        if options["suite"]:
            return cls._of_suite(options)
        name = options["model"] or DEFAULT
        model = MODELS[name]
        # float16 is 0.
        dtype = DType.BF16 if options["dtype"] is None else options["dtype"]
        extents = {
            "layers": options["layers"] or model.layers,
            "kv_heads": options["kv_heads"] or model.kv_heads,
            "head_dim": options["head_dim"] or model.head_dim,
            "outer_dim": options["outer_dim"] or model.outer_dim,
        }
        layers, kv_heads, head_dim, outer_dim = extents.values()
        is_preset = all(getattr(model, extent) == value for extent, value in extents.items())
        title = model.title if is_preset else "custom"
        baseline = options["baseline"] or "copy"
        shapes = [BlockShape(layers, outer_dim, kv_heads, nt, head_dim, dtype) for nt in options["tokens_per_block"]]
        directions = options["direction"] or (["h2h"] if _no_gpu() else ["h2d", "d2h", "d2d"])
        cases = combinations(
            shapes,
            options["num_blocks"],
            options["pattern"],
            directions,
            options["backend"],
            baseline=baseline,
            max_sms=options["max_sms"],
            beside=options["beside"],
        )
        lists = {
            "tokens_per_block": options["tokens_per_block"],
            "num_blocks": options["num_blocks"],
            "directions": directions,
            "patterns": [pattern.name for pattern in options["pattern"]],
            "backends": list(dict.fromkeys(case.backend for case in cases)),
        }
        banner = [
            "KV Cache Transfer Benchmark",
            f"  Model: {title} ({dtype})",
            f"  Layers: {layers}, KV heads: {kv_heads}, Head dim: {head_dim}, Outer dim: {outer_dim}",
            *_effort_lines(options),
            *[f"  {name}: [{', '.join(map(str, values))}]" for name, values in lists.items()],
            f"  Total tests: {len(cases)}",
            _library_line(),
        ]
        if not options["direction"] and (reason := _no_gpu()):
            banner.append(f"  GPU: none ({reason}); measuring h2h")
        settings = {
            "num_blocks": lists["num_blocks"],
            "tokens_per_block": lists["tokens_per_block"],
            # Where none was named they depend on the pattern and the direction.
            "backend": options["backend"],
            "direction": directions,
            "pattern": lists["patterns"],
            "model": name if is_preset else None,
            **extents,
            "dtype": str(dtype),
            "baseline": baseline,
            **_as_given(options, "max_sms", "beside", "warmup", "iters", "library"),
        }
        return cls(cases, banner, settings)

    @classmethod
    def _of_suite(cls, options: Mapping[str, Any]) -> Request:
        wanted = (options["only"] or "").split(",")
        cases = [
            case
            for case in suite(options["suite"])
            if any(text in f"{case.title} {case.pattern.name}" for text in wanted)
        ]
        if not cases:
            raise KvbmValueError(f"--only {options['only']!r} leaves no test of the suite {options['suite']}")
        banner = [
            "KV Cache Transfer Benchmark",
            f"  Suite: {options['suite']}",
            *_effort_lines(options),
            f"  Total tests: {len(cases)}",
            _library_line(),
        ]
        return cls(cases, banner, _as_given(options, "suite", "only", "warmup", "iters", "library"))


def run_tests(
    request: Request, effort: Effort, library: str | None, command: str, *, keeps_on: bool
) -> tuple[Run, int]:
    """Measure all tests; the results, and the exit status: 1 if a test was wrong or failed, 130 if interrupted.

    With ``keeps_on`` all are measured even if standard output takes no more, which the status is 1 for, too. Without,
    OSError is raised then.
    """
    machines = _Machines(library)
    run = Run(request.settings, _provenance(command))
    bench = Bench(effort, machines.of)
    banner = [*request.banner, *machines.banner(request.cases)]
    report = Report(banner, request.cases, 2 * (effort.warmup + effort.iters), keeps_on=keeps_on)
    try:
        with report, _interrupts_held() as let_through:
            for case in request.cases:
                report.begin(case)
                with let_through():
                    result = bench.run(case, report.tick)
                run.results.append(result)
                report.end(result)
    except KeyboardInterrupt:
        run.interrupted = True
        run.results += [Result(case, "not_run", "interrupted") for case in request.cases[len(run.results) :]]
    run.provenance["machines"] = machines.provenance()
    report.finish(run)
    counts = run.counts
    if counts["wrong"] or counts["failed"] or report.has_lost:
        return run, 1
    return run, INTERRUPTED if run.interrupted else 0


@contextlib.contextmanager
def _interrupts_held() -> Iterator[Callable[[], contextlib.AbstractContextManager[None]]]:
    """Hold Ctrl-C back, so that it does not come between a test and what is written of it.

    Gives a context in which it raises KeyboardInterrupt as ever, at once if it was held back before. Where it is
    ignored, as by a job that a script started in the background, it stays so.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        yield contextlib.nullcontext
        return
    is_held, came = True, False

    def handler(*_: object) -> None:
        nonlocal came
        came = True
        if not is_held:
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def let_through() -> Iterator[None]:
        nonlocal is_held
        is_held = False
        try:
            if came:
                raise KeyboardInterrupt
            yield
        finally:
            is_held = True

    before = signal.signal(signal.SIGINT, handler)
    try:
        yield let_through
    finally:
        signal.signal(signal.SIGINT, before)


class _Machines:
    """The machine of each direction, made when it is first asked for."""

    def __init__(self, library: str | None) -> None:
        self._library = library

    def of(self, direction: str) -> Machine:
        return self._host if direction == "h2h" else self._cuda

    @functools.cached_property
    def _host(self) -> Machine:
        return HostMachine()

    @functools.cached_property
    def _cuda(self) -> Machine:
        if reason := _no_gpu():
            raise LookupError(reason)
        return cuda_machine(self._library)

    def provenance(self) -> dict[str, Any]:
        """Of those that were used."""
        made = {"host": self.__dict__.get("_host"), "cuda": self.__dict__.get("_cuda")}
        return {name: machine.provenance() for name, machine in made.items() if machine is not None}

    def banner(self, cases: list[Case]) -> list[str]:
        """A line for each machine that the tests run on."""
        lines = []
        for direction in dict.fromkeys("h2h" if case.direction == "h2h" else "d2d" for case in cases):
            try:
                machine = self.of(direction)
            except LookupError as error:
                lines.append(f"  GPU: none ({error})")
            else:
                lines.append(f"  {'Host' if direction == 'h2h' else 'GPU'}: {machine.device}, {machine.library}")
        return lines


def _as_given(options: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: options[name] for name in names}


def _no_gpu() -> str | None:
    """Why the library has no GPU to work on, or None where it has."""
    if kk.is_stub_build():
        return "this build of kvbm_kernels has no CUDA"
    return None if kk.build_info().devices else "there is no CUDA device, or no driver for it"


def _library_line() -> str:
    return f"  Library: {built(asdict(kk.build_info()))}"


def _effort_lines(options: Mapping[str, Any]) -> list[str]:
    return [
        f"  Warmup: {options['warmup']}, Timed: {options['iters']}",
        f"  Batch API available: {str(kk.has_memcpy_batch_async()).lower()}",
    ]


def _provenance(command: str) -> dict[str, Any]:
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": command,
        "kvbm_kernels": asdict(kk.build_info()),
        "python": platform.python_version(),
        "system": platform.platform(),
    }
