"""Costs of sparse prefills: predicted seconds, and measured losses. The router's planner and placer use it.

A loss says how far answers are from exact ones, by prompt length, ranks and share of keys. Losses are measured by
`ringserve calibrate --sparse` on one model, and looked up, never fitted. A length between two measured ones has the
larger loss of both. There is no loss for a longer prompt than the longest measured, nor for a ring of more ranks. Pure
Python; it reads the file of losses.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from ringserve.cp_core.cost.model import PASS_KV, ModelShape, PrefillRates
from ringserve.cp_core.cost.steps import StepPredictor
from ringserve.cp_core.errors import ConfigError, InvalidRequest
from ringserve.cp_core.layout.sparsity import LATEST, STRIDED, Sparsity


def sparse_seconds(
    model: ModelShape, rates: PrefillRates, num_ranks: int, sparsity: Sparsity, new_tokens: int, cached_tokens: int
) -> float:
    """Return the seconds of T new tokens after P cached ones by pass_kv with a sparsity.

    The first and the last layer are exact. In the other layers a rank attends all its own keys and the chosen keys of
    other ranks; only chosen keys are sent. Before that, each rank sends its sampled queries to all ranks and scores its
    own keys by all of them, which costs half as much as attending them.
    """
    exact = StepPredictor(model, rates, num_ranks).cost(PASS_KV, new_tokens, cached_tokens)
    num_sparse = model.num_layers - 2
    if num_ranks == 1 or num_sparse <= 0 or sparsity.is_exact:
        return exact.total_seconds
    hops, stored = num_ranks - 1, -(-(new_tokens + cached_tokens) // num_ranks)
    sampled, share = min(new_tokens, LATEST + STRIDED), sparsity.chosen(stored) / stored
    head_bytes = model.head_dim * model.attention_bytes
    iteration = exact.attention_seconds / model.num_layers / num_ranks
    message = rates.message_seconds(sparsity.chosen(stored) * 2 * model.num_kv_heads * head_bytes)
    exposed = message - rates.ring.overlap * min(message, share * iteration)
    asked = rates.message_seconds(hops * -(-sampled // num_ranks) * model.num_heads * head_bytes)
    scored = 2 * model.num_heads * model.head_dim * sampled * stored / rates.ring.attention_flops
    sparse = hops * (share * iteration + exposed) + asked + scored
    return exact.total_seconds + num_sparse * (sparse - hops * iteration - exact.exposed_seconds / model.num_layers)


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredLoss:
    """Loss of answers after prompts of `num_tokens` tokens on `num_ranks` ranks, if the share `keep` of keys is sent.

    `loss` is the mean KL divergence of the answer tokens from exact ones, in nats. `accuracy` is the share of
    `num_questions` answered correctly, `exact_accuracy` the share with exact attention.
    """

    num_tokens: int
    num_ranks: int
    keep: float
    loss: float
    accuracy: float
    exact_accuracy: float
    num_questions: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PredictedLoss:
    """Sparsity with the loss predicted for one prompt: the larger loss of the two measured lengths beside it.

    `nearest` is the measurement at the length nearest to the prompt's.
    """

    sparsity: Sparsity
    loss: float
    nearest: MeasuredLoss


@dataclass(frozen=True, kw_only=True)
class SparseLosses:
    """Losses of one model. All measurements had these `sinks` and this `window`, in tokens of a partition."""

    model: str
    sinks: int
    window: int
    measured: tuple[MeasuredLoss, ...]

    def predict(self, num_tokens: int, num_ranks: int) -> list[PredictedLoss]:
        """Return a prediction for each measured share of keys, the least loss first.

        The measurements on the smallest ring of at least `num_ranks` ranks count, which is the safe side: with more
        ranks each query sees fewer keys. Raises InvalidRequest for a longer prompt, or more ranks, than were measured.
        """
        ranks = min((each.num_ranks for each in self.measured if each.num_ranks >= num_ranks), default=None)
        if ranks is None:
            most = max(each.num_ranks for each in self.measured)
            raise InvalidRequest(
                f"losses of sparse prefills were measured on rings of up to {most} ranks; a ring has {num_ranks}"
            )
        here = [each for each in self.measured if each.num_ranks == ranks]
        longest = max(each.num_tokens for each in here)
        if num_tokens > longest:
            raise InvalidRequest(
                f"losses of sparse prefills were measured up to {longest} tokens; the prompt has {num_tokens}"
            )
        keeps = sorted({each.keep for each in here})
        found = [self._predict(keep, [each for each in here if each.keep == keep], num_tokens) for keep in keeps]
        return sorted(filter(None, found), key=lambda each: (each.loss, -each.sparsity.keep))

    def _predict(self, keep: float, measured: Sequence[MeasuredLoss], num_tokens: int) -> PredictedLoss | None:
        """Return the prediction for one share, None if it was not measured at so great a length."""
        by_length = sorted(measured, key=lambda each: each.num_tokens)
        above = next((each for each in by_length if each.num_tokens >= num_tokens), None)
        if above is None:
            return None
        below = [each for each in by_length if each.num_tokens < num_tokens]
        around = [*below[-1:], above]
        return PredictedLoss(
            sparsity=Sparsity(keep=keep, sinks=self.sinks, window=self.window),
            loss=max(each.loss for each in around),
            nearest=min(around, key=lambda each: abs(each.num_tokens - num_tokens)),
        )


def format_losses(losses: SparseLosses) -> str:
    """Return the file's text, one measurement a line."""
    lines = ",\n  ".join(json.dumps(asdict(each)) for each in losses.measured)
    head = {"model": losses.model, "sinks": losses.sinks, "window": losses.window}
    return json.dumps(head)[:-1] + f', "measured": [\n  {lines}\n]}}\n'


def read_losses(path: Path) -> SparseLosses:
    """Read a file that `format_losses` wrote. Raises ConfigError, which names the file and the field."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        found = SparseLosses(
            model=_typed(values, "model", str),
            sinks=_typed(values, "sinks", int),
            window=_typed(values, "window", int),
            measured=tuple(_measured(values["measured"])),
        )
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{path} holds no losses of sparse prefills: {error}; write it by calibrate --sparse"
        ) from error
    if not found.measured:
        raise ConfigError(f"{path} holds no measurement; write it by calibrate --sparse")
    return found


def _measured(items: Iterable[dict[str, Any]]) -> Iterable[MeasuredLoss]:
    for item in items:
        kinds = {each.name: float if each.type == "float" else int for each in fields(MeasuredLoss)}
        found = MeasuredLoss(**{name: _typed(item, name, kind) for name, kind in kinds.items()})
        try:
            Sparsity(keep=found.keep).check()
        except InvalidRequest as error:
            raise ValueError(str(error)) from error
        if not (found.num_tokens >= 1 and found.num_ranks >= 1 and 0.0 <= found.loss < float("inf")):
            raise ValueError(f"{item} has num_tokens or num_ranks below 1, or a loss that is negative or not finite")
        yield found


def _typed(values: dict[str, Any], name: str, kind: type) -> Any:
    value = values[name]
    allowed = (int, float) if kind is float else kind
    if isinstance(value, bool) or not isinstance(value, allowed):
        raise ValueError(f"{name} is {value!r}; allowed is a value of type {kind.__name__}")
    return kind(value)
