"""`python -m bench systems`: claims with a range each, met by the model and by messages in virtual time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.__main__ import main
from bench.selection.links import parse_rate
from bench.selection.measure import SelectionSettings, Show
from bench.selection.results import JudgedCell, RingResult, SelectionReport, score_policies
from bench.systems import command as bench_systems
from bench.systems.chain_cuts import equal_work_cuts
from bench.systems.claims import Claim, Figure, Source, closing_lines
from bench.systems.links import CELLS, link_claims
from bench.systems.messages import chain_by_messages, ring_by_messages, scaled
from bench.systems.model import chain_of, kv_runahead_rates, tsp_seconds
from ringserve.cp_core.cost.chain import chain_seconds
from ringserve.cp_core.cost.model import CHAIN, PASS_KV, PASS_Q
from ringserve.cp_core.cost.profile import read_profile
from ringserve.services.offline.calibration.fitting import Errors
from ringserve.services.offline.terminal import Tell


def claim(source: Source = Source.MODEL, ours: float = 2.0, why: str = "") -> Claim:
    figures = (Figure.near("close", 1.05, 1.0, 0.1), Figure.at_most("share", ours, 1.0))
    return Claim(source=source, name="a claim", published="1", accepted="10%", figures=figures, why=why)


@pytest.mark.slow
def test_every_claim_of_the_model_and_of_messages_is_met_and_told(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    plot = tmp_path / "systems.png"
    assert main(["systems", "--json", "--plot", str(plot)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert {each["source"] for each in report["claims"]} == {"m", "v"}
    assert len(report["claims"]) == 20
    missed = {each["name"]: each for each in report["claims"] if each["verdict"] != "met"}
    assert list(missed) == ["CSPS 5.3: 22% dropped, bytes and pairs saved"]
    (explained,) = missed.values()
    assert explained["verdict"] == "MISSED, explained"
    saved, attended = (figure["ours"] for figure in explained["figures"])
    assert saved >= 0.19, "bytes fall as in the paper; pairs do not, since no query is dropped"
    assert 0.15 < attended < 0.22
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("missed", "status", "verdict"),
    [
        (claim(), 1, "MISSED"),
        (claim(why="measured: another one"), 0, "MISSED, explained"),
        (claim(source=Source.LINKS), 0, "MISSED"),
        (claim(ours=0.5), 0, "met"),
    ],
)
def test_a_miss_that_nothing_explains_is_the_exit_status(
    missed: Claim, status: int, verdict: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_systems, "_measure", lambda *_: [missed])
    assert main(["systems", "--source", "m"]) == status
    assert verdict in capsys.readouterr().out
    told = "\n".join(closing_lines([missed]))
    assert ("a claim: share" in told) is (verdict != "met")
    assert "a claim: close" not in told


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--source", "m,x"), "--source: 'x' is no source; allowed are m, v, s"),
        (("--rounds", "0"), "--rounds: 0 is out of range"),
        (("--source", "s", "--rounds", "2"), "--rounds: 2 is out of range; allowed are 3 or more with source s"),
        (("--source", "m,s", "--rounds", "2"), "--rounds: 2 is out of range; allowed are 3 or more with source s"),
        (("--source", "s", "--rates", "fast"), "--rates: 'fast' is no rate"),
    ],
)
def test_what_it_cannot_measure_is_refused_before_anything_is(
    arguments: tuple[str, ...], sentence: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_systems, "_measure", lambda *_: pytest.fail("measured first"))
    assert main(["systems", *arguments]) != 0
    assert sentence in capsys.readouterr().err


def ring_of(rate: str, chosen: str, noise: float) -> RingResult:
    """Return a ring of two ranks where pass-KV takes 2 s, pass-Q 3 s, chain 1 s, and `auto` chooses one of them."""
    cells = tuple(
        JudgedCell(
            cell=cell,
            seconds={PASS_KV: (2.0,), PASS_Q: (3.0,), CHAIN: (1.0,)},
            predicted={PASS_KV: 2.0, PASS_Q: 3.0, CHAIN: 1.0},
            chosen={"auto": chosen},
        )
        for cell in CELLS
    )
    profile = read_profile("gtt")
    return RingResult(
        ranks=2,
        rate=parse_rate(rate),
        measured=profile.prefill.rates(2, is_cached=False).ring,
        profile=profile,
        rows=(),
        fitted=Errors(rms=0.0, worst=0.0),
        held_out=None,
        cells=cells,
        scores=score_policies(cells),
        noise=noise,
    )


@pytest.mark.parametrize(
    ("chosen", "noise", "verdict"),
    [(CHAIN, 0.0, "met"), (PASS_KV, 0.5, "MISSED"), (PASS_KV, 1.0, "MISSED, explained")],
)
def test_a_loss_of_auto_is_explained_where_noise_is_as_large(chosen: str, noise: float, verdict: str) -> None:
    rings = ring_of("50mbit", CHAIN, 0.0), ring_of("1gbit", chosen, noise)
    claims = link_claims(SelectionReport(settings="", rings=rings, disagreements=()))
    auto, beside = (claim for claim in claims if claim.name.startswith("auto"))
    assert auto.verdict == verdict
    assert [figure.ours for figure in beside.figures] == [-0.5, 0.0 if chosen == PASS_KV else -0.5]
    assert [figure.ours for figure in auto.figures] == [0.0, 1.0 if chosen == PASS_KV else 0.0]


def test_interrupted_links_have_the_claims_on_the_rates_that_were_finished(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measured(settings: SelectionSettings, tell: Tell, show: Show) -> SelectionReport:
        show(SelectionReport(settings="", rings=(ring_of("20mbit", CHAIN, 0.0),), disagreements=()))
        raise KeyboardInterrupt

    monkeypatch.setattr("bench.selection.measure.measured_in_namespaces", measured)
    assert main(["systems", "--source", "s", "--json"]) == 0
    told = capsys.readouterr()
    figures = [figure["name"] for claim in json.loads(told.out)["claims"] for figure in claim["figures"]]
    assert figures == ["2 ranks, 20mbit: pass-KV over chain 2.00, predicted 2.00", "2 ranks, 20mbit", "2 ranks, 20mbit"]
    assert "interrupted after 1 of 8 rings" in told.err
    assert "a rank alone 1.00 times as fast" in told.err


@pytest.mark.parametrize("cuts", [(0, 40, 70, 96), (0, 0, 50, 96), (0, 96, 96, 96), (0, 0, 0, 96)])
def test_messages_of_any_cuts_take_what_the_recurrence_says(cuts: tuple[int, ...]) -> None:
    rates = scaled(chain_of(3e9, 3))
    assert chain_by_messages(cuts, rates) == pytest.approx(chain_seconds(cuts, 0, rates), rel=1e-9)


def test_messages_take_the_same_time_in_every_run() -> None:
    rates = scaled(chain_of(20e9, 4))
    assert len({ring_by_messages(96, rates) for _ in range(3)}) == 1


def test_tsp_computes_each_part_over_all_tokens_and_hides_nothing() -> None:
    rates = kv_runahead_rates(4, 10e9)
    num_tokens, part = 8192, 2048
    gather = 3 * part * rates.kv_bytes / rates.link_bytes_per_second
    layer = part * rates.token_seconds + part * num_tokens * rates.pair_seconds + gather + rates.layer_seconds
    assert tsp_seconds(num_tokens, rates) == pytest.approx(32 * layer + rates.head_seconds)
    assert tsp_seconds(num_tokens, rates, 2.0) == pytest.approx(32 * (layer + gather) + rates.head_seconds)
    even = chain_seconds(equal_work_cuts(num_tokens, 0, rates), 0, rates)
    assert even < tsp_seconds(num_tokens, rates)
