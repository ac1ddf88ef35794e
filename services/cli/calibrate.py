"""`ringserve calibrate`: measure serving rings, and write the profile that their router plans by."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from ringserve.client import Client
from ringserve.cp_core.cost.profile import format_profile
from ringserve.cp_core.cost.sparse import format_losses
from ringserve.cp_core.errors import ConfigError
from ringserve.cp_core.layout.sparsity import Sparsity
from ringserve.services.cli.command import command, flag, option
from ringserve.services.cli.options import JsonFlag, PlotFile, ServingOptions, read_text
from ringserve.services.gateway.text import TextCodec
from ringserve.services.offline.calibration.fitting import Calibration, profile_from_rings, shape_of
from ringserve.services.offline.calibration.fitting import calibrate as fit_profile
from ringserve.services.offline.calibration.measurement import Calibrator, grid, max_sequence_tokens
from ringserve.services.offline.calibration.report import (
    calibration_json,
    calibration_table,
    closing_lines,
    write_calibration_plot,
)
from ringserve.services.offline.demo import document
from ringserve.services.offline.reports import require_matplotlib
from ringserve.services.offline.terminal import console, print_table, progress_bar
from ringserve.services.offline.units import parse_token_counts
from ringserve.workers.model.builtin import has_random_weights, resolve_model_path
from ringserve.workers.protocol.steps import CALIBRATED_ALGORITHMS

PROFILE_NAME = "measured"
MAX_THREAD_RANKS = 16


@dataclass(frozen=True, kw_only=True)
class SparseOptions:
    """Options of the losses of sparse prefills."""

    sparse: bool = flag("measure losses of the configured model instead of times")
    ranks: int = option("with --sparse: ranks, threads of this process", default=4, min=2, max=MAX_THREAD_RANKS)
    keep: str = option("with --sparse: shares of keys that are kept", "SHARE,...", "0.5,0.25,0.125")
    depths: str = option("with --sparse: places of the hidden sentences, 0 to 1", "X,...", "0.1,0.3,0.5,0.7,0.9")
    sinks: int = option("with --sparse: number of first keys of a partition that are always kept", default=4)
    window: int = option("with --sparse: number of last keys that are always kept", default=64)
    text: Path | None = option("with --sparse: text to hide sentences in (default: a short diary)", default=None)


@dataclass(frozen=True, kw_only=True)
class CalibrateOptions:
    service: ServingOptions
    tokens: str = option("new tokens (default: of 32,128,512,2048 those that fit)", "T,...", "")
    cached: str = option("cached tokens (default: of 0,1024,4096 those that fit)", "P,...", "")
    repeats: int = option("runs of every prefill; the median counts", default=5, min=1)
    timeout: float = option("deadline of each turn", "SECONDS", 300.0)
    seed: int = option("seed of the prompts", default=0)
    write: Path | None = option("write the profile, for router.profile and --hardware", default=None)
    json: JsonFlag = False
    plot: PlotFile = None
    sparse: SparseOptions


@command(
    "ringserve calibrate --write measured.json",
    "ringserve calibrate --start --config cluster.yaml --tokens 1k,8k,64k --cached 0,64k,512k --plot calibration.png",
    "ringserve up --config cluster.yaml --set router.profile=measured.json",
    "ringserve calibrate --sparse --set model.path=builtin:smollm2 --tokens 500,1k,2k --write losses.json",
    "ringserve up --set model.path=builtin:smollm2 --set router.sparse_losses=losses.json",
    description="""Runs a grid of prefills by pass-KV, pass-Q and chain. Starts from the rates that rings measured of
themselves, and fits compute rates, links, overheads and the constants of chains. Serve nothing else meanwhile.

With --sparse it serves nothing: it measures in this process how far answers of sparse prefills are from exact ones, by
questions about sentences hidden in a text, and writes the losses that requests may bound by max_loss or max_ttft.""",
)
def calibrate(options: CalibrateOptions) -> int:
    _check(options)
    if options.sparse.sparse:
        return _measure_losses(options, options.sparse)
    new_tokens = parse_token_counts("--tokens", options.tokens) if options.tokens else None
    cached_tokens = parse_token_counts("--cached", options.cached, least=0) if options.cached else None
    if options.plot is not None:
        require_matplotlib()
    with options.service.serving() as target, options.service.gateway.client(target) as client:
        calibration = _calibrate(client, options, new_tokens, cached_tokens)
    if options.write is not None:
        options.write.write_text(format_profile(calibration.profile), encoding="utf-8")
    if options.plot is not None:
        write_calibration_plot(calibration, options.plot)
    if options.json:
        print(calibration_json(calibration))
        return 0
    print_table(console(), calibration_table(calibration))
    print(*closing_lines(calibration), sep="\n")
    if options.write is not None:
        print(f"written: {options.write}; plan by it with --set router.profile={options.write}")
    return 0


def _measure_losses(options: CalibrateOptions, sparse: SparseOptions) -> int:
    """Measure losses of sparse prefills in this process."""
    config = options.service.config.load()
    lengths = parse_token_counts("--tokens", options.tokens or "512,1024,2048")
    keeps, depths = _shares("--keep", sparse.keep, least=1e-6), _shares("--depths", sparse.depths, least=0.0)
    sparsities = [Sparsity(keep=keep, sinks=sparse.sinks, window=sparse.window) for keep in keeps]
    for sparsity in sparsities:
        sparsity.check()
    if has_random_weights(config.model.path):
        raise ConfigError(f"model.path: {config.model.path} is not trained, and has no answers that could be lost")
    if options.plot is not None:
        require_matplotlib()
    path = resolve_model_path(config.model.path)
    # Other uses of the command do without torch, whose import takes seconds.
    from ringserve.services.offline.calibration.sparse import LossMeter, Result, losses_of, make_questions
    from ringserve.services.offline.calibration.sparse_report import losses_json, losses_table, write_losses_plot

    codec = TextCodec(path)
    text = document(codec) if sparse.text is None else read_text(sparse.text)
    questions = {length: make_questions(codec, text, length, depths) for length in lengths}
    meter = LossMeter(path, config.model.dtype, sparse.ranks)
    if lengths[-1] > meter.max_tokens:
        raise ConfigError(f"--tokens: {lengths[-1]} is out of range; the model allows at most {meter.max_tokens}")
    results: list[Result] = []
    with progress_bar(len(lengths) * len(depths) * (len(keeps) + 1), "answers") as tell:
        for length, asked in questions.items():
            for question in asked:
                results += meter.measure(length, question, sparsities, tell)
    losses = losses_of(Path(config.model.path).name, sparse.ranks, sparse.sinks, sparse.window, results)
    if options.write is not None:
        options.write.write_text(format_losses(losses), encoding="utf-8")
    if options.plot is not None:
        write_losses_plot(losses, results, options.plot)
    if options.json:
        print(losses_json(losses, results))
        return 0
    print_table(console(), losses_table(losses))
    if options.write is not None:
        print(f"written: {options.write}; start the service with --set router.sparse_losses={options.write}")
    return 0


def _shares(key: str, text: str, least: float) -> list[float]:
    """Parse "0.5,0.25" into distinct numbers up to 1, in their order. Raises ConfigError."""
    shares = []
    for item in text.split(","):
        try:
            share = float(item)
        except ValueError:
            raise ConfigError(f"{key}: {item!r} is not a number; give numbers like 0.25") from None
        if not least <= share <= 1.0:
            raise ConfigError(f"{key}: {share:g} is out of range; allowed are {'0' if not least else 'above 0'} to 1")
        shares.append(share)
    return list(dict.fromkeys(shares))


def _calibrate(
    client: Client, options: CalibrateOptions, new_tokens: list[int] | None, cached_tokens: list[int] | None
) -> Calibration:
    model, server = client.model_info(), client.server_info()
    cells = grid(new_tokens, cached_tokens, max_sequence_tokens(model, server))
    name = PROFILE_NAME if options.write is None else options.write.stem
    before = profile_from_rings(model, server.rings, name)
    calibrator = Calibrator(client, repeats=options.repeats, timeout=options.timeout, seed=options.seed)
    with progress_bar(len(cells) * len(CALIBRATED_ALGORITHMS) * options.repeats, "prefills") as tell:
        measurements = calibrator.prefills(cells, tell)
    steps = calibrator.steps(sorted({cell.cached_tokens + cell.new_tokens for cell in cells}))
    rings = sorted({f"{each.ring} ({each.sample.cp} x {each.sample.tp})" for each in measurements})
    source = (
        f"ringserve calibrate: {len(measurements)} prefills of {model.model_path} on {', '.join(rings)}, "
        f"median of {options.repeats}. Decode: time between tokens of single sequences. Not measured: KV links beside "
        f"those of the ring, memory beyond weights and KV, row, hop and sum times of decode."
    )
    return fit_profile(shape_of(model), replace(before, source=source), measurements, steps)


def _check(options: CalibrateOptions) -> None:
    """Check options that would otherwise fail only after measuring. Raises ConfigError."""
    if not options.timeout > 0:
        raise ConfigError(f"--timeout: {options.timeout} is not a duration; give a number above 0")
    for key in ("write", "plot"):
        path = getattr(options, key)
        if path is not None and not path.absolute().parent.is_dir():
            raise ConfigError(f"--{key}: {path} cannot be written, its directory does not exist")
