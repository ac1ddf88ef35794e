"""Results of turns of both Python clients. Fields have the names of the contract, and its defaults."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from ringserve.mapping import Mapper, enum_name
from ringserve.v1 import inference_pb2

MAPPER = Mapper()


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Tokens of one turn. `cached_tokens` of the prompt were not computed again.

    `accepted_draft_tokens` of the completion were guessed from the text before them, and rightly, so they cost no step
    of their own.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    accepted_draft_tokens: int = 0


@dataclass(frozen=True, kw_only=True)
class CachedSource:
    """Prompt tokens [start, stop) that were not computed.

    `source` is "kept_on_prefill", "pulled_from_decode" or "pulled_from_other". `ring` is the ring that retained them,
    if it is not one of the plan's own.
    """

    source: str = ""
    start: int = 0
    stop: int = 0
    ring: str = ""


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """New tokens [start, stop) that one step computed by `algorithm`.

    `num_turns` turns shared the step, this one included; 0 if the chunk is a prediction. `fallback` is empty, or the
    layout that was used since the intended one had no room: "level_cuts" for a chain, "spread" for a short prompt that
    should lie on one rank.
    """

    start: int = 0
    stop: int = 0
    algorithm: str = ""
    num_turns: int = 0
    fallback: str = ""


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """Predicted time of computing every chunk by `algorithm`."""

    algorithm: str = ""
    predicted_prefill_seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Failover:
    """Loss of a turn's ring of `role`, or of its gateway, when the client had `after_tokens` tokens of the answer.

    The turn went on on the two rings: they computed `new_tokens` tokens of prompt and answer again, and had the KV of
    `cached_tokens`. `lost_seconds` passed from the loss to the next token.
    """

    role: str = ""
    cause: str = ""
    after_tokens: int = 0
    prefill_ring: str = ""
    decode_ring: str = ""
    new_tokens: int = 0
    cached_tokens: int = 0
    lost_seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class RingAlternative:
    """Predicted time of the turn on one ring of `num_ranks` ranks of `tp` processes, in seconds.

    A decode ring is an alternative if it can compute the prompt itself. `handoff_seconds` is the transfer of new KV
    from a prefill ring. `stall_seconds` is the total wait of the turns that decode on a decode ring.
    """

    ring: str = ""
    num_ranks: int = 0
    tp: int = 0
    queue_seconds: float = 0.0
    move_seconds: float = 0.0
    prefill_seconds: float = 0.0
    handoff_seconds: float = 0.0
    stall_seconds: float = 0.0
    total_seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class SparsePlan:
    """Sparsity of an approximate turn: the share of keys that reached other ranks, and the bound that allowed it.

    Losses are mean KL divergences, in nats, of the distributions of answer tokens from those of exact turns, as the
    service's operator measured them.
    """

    keep: float = 0.0
    sinks: int = 0
    window: int = 0
    bound: str = ""
    limit: float = 0.0
    predicted_loss: float = 0.0
    measured_loss: float = 0.0
    measured_accuracy: float = 0.0
    measured_tokens: int = 0


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Turn plan: how it is computed and why. Measured values are 0 until they are known; times in seconds.

    With `sparse` the answer is approximate.
    """

    algorithm: str = ""
    reason: str = ""
    remarks: tuple[str, ...] = ()
    prompt_mode: str = ""
    new_tokens: int = 0
    cached_tokens: int = 0
    prefill_ring: str = ""
    decode_ring: str = ""
    prefill_ranks: int = 0
    decode_ranks: int = 0
    decode_turns: int = 0
    predicted_prefill_seconds: float = 0.0
    correction: float = 0.0
    prefill_seconds: float = 0.0
    queue_seconds: float = 0.0
    migrated_bytes: int = 0
    migration_seconds: float = 0.0
    pulled_bytes: int = 0
    pull_seconds: float = 0.0
    handoff_seconds: float = 0.0
    cached_sources: tuple[CachedSource, ...] = ()
    chunks: tuple[Chunk, ...] = ()
    alternatives: tuple[Alternative, ...] = ()
    ring_alternatives: tuple[RingAlternative, ...] = ()
    failovers: tuple[Failover, ...] = ()
    sparse: SparsePlan | None = None


@dataclass(frozen=True, kw_only=True)
class TokenLogprobs:
    """Log-probability of a token over the whole vocabulary, before temperature, penalties and filters.

    `rank` is 1 for the most likely token. The `top_` fields have the most likely tokens, the most likely first.
    """

    token_id: int = 0
    logprob: float = 0.0
    rank: int = 0
    top_token_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Answer part, in whole characters. A token that ends within a character has no text yet.

    `index` is the answer's number among the `n` of the request. `logprobs` are the tokens', if requested.
    """

    text: str = ""
    token_ids: tuple[int, ...] = ()
    index: int = 0
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Finished turn. If `finish_reason` is "stop", `matched_stop` is the token or string that ended it.

    `choices` are all answers of a request with `n`, in order; this is the first of them. Each is a turn with its own
    plan and usage. Log-probabilities are there if requested, the prompt's from its second token on.
    """

    request_id: str = ""
    conversation_id: str = ""
    text: str = ""
    token_ids: tuple[int, ...] = ()
    finish_reason: str = ""
    matched_stop: int | str | None = None
    usage: Usage = Usage()
    plan: Plan = Plan()
    ttft_seconds: float = 0.0
    ttit_seconds: float = 0.0
    seed: int = 0
    index: int = 0
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    others: tuple[Answer, ...] = ()

    @property
    def choices(self) -> tuple[Answer, ...]:
        return (self, *self.others)


def matched_stop(complete: inference_pb2.GenerateComplete) -> int | str | None:
    """Return the stop string or token that ended the answer; None: its length did."""
    if complete.HasField("matched_stop_str"):
        return complete.matched_stop_str
    return complete.matched_stop if complete.HasField("matched_stop") else None


class AnswerReader:
    """Reader of one request's responses. `plan` is set after the first response, and `answer` after the last.

    `remembered_tokens` is the number of tokens that the conversation has, if known: before the turn starts that of the
    turns before, None while it runs, and the new one once it has ended well.
    """

    def __init__(self, remembered_tokens: int | None = None, num_answers: int = 1) -> None:
        self.remembered_tokens = remembered_tokens
        self.plan: Plan | None = None
        self._num_answers = num_answers
        self._answers: dict[int, Answer] = {}
        self._start = inference_pb2.GenerateStart()
        self._num_shown = [0] * num_answers  # characters, by answer

    @property
    def answer(self) -> Answer | None:
        """First answer, with the others; None before all have come."""
        if len(self._answers) < self._num_answers:
            return None
        first, *others = (self._answers[index] for index in sorted(self._answers))
        return replace(first, others=tuple(others))

    def take(self, response: inference_pb2.GenerateResponse) -> Piece | None:
        """Return the piece that a response brings, if any."""
        if response.HasField("start"):
            self._start = response.start
            self.remembered_tokens = None
            self.plan = MAPPER.from_message(Plan, response.start.plan)
            return None
        if response.HasField("chunk"):
            chunk = response.chunk
            self._num_shown[chunk.index] += len(chunk.text)
            return Piece(
                text=chunk.text,
                token_ids=tuple(chunk.token_ids),
                index=chunk.index,
                logprobs=_logprobs(chunk.logprobs),
            )
        complete = response.complete
        self.plan = MAPPER.from_message(Plan, complete.plan)
        self.remembered_tokens = complete.usage.prompt_tokens + complete.usage.completion_tokens
        self._answers[complete.index] = Answer(
            request_id=self._start.request_id,
            conversation_id=self._start.conversation_id,
            text=complete.text,
            token_ids=tuple(complete.output_ids),
            finish_reason=enum_name(inference_pb2.FinishReason, complete.finish_reason),
            matched_stop=matched_stop(complete),
            usage=MAPPER.from_message(Usage, complete.usage),
            plan=self.plan,
            ttft_seconds=complete.ttft_seconds,
            ttit_seconds=complete.ttit_seconds,
            seed=complete.seed,
            index=complete.index,
            logprobs=_logprobs(complete.output_logprobs),
            prompt_logprobs=_logprobs(complete.prompt_logprobs),
        )
        rest = complete.text[self._num_shown[complete.index] :]
        return Piece(text=rest, token_ids=(), index=complete.index) if rest else None


def _logprobs(messages: Iterable[inference_pb2.TokenLogprobs]) -> tuple[TokenLogprobs, ...]:
    return tuple(MAPPER.from_message(TokenLogprobs, each) for each in messages)
