"""The request machine: its table, and random event orders against an independent model."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.request_events import (
    Abandoned,
    AskPlacement,
    AttemptGivenBack,
    ClientGone,
    ConductorLost,
    EndRequest,
    EngineFailed,
    Event,
    Finished,
    NeverFits,
    Overloaded,
    Placed,
    Rejected,
    RequestSpec,
    RetryLimits,
    SendToDecode,
    SendToPrefill,
    SetTimer,
    StreamToken,
    Submitted,
    TellConductor,
    TextDelta,
    TimerFired,
    TokenReceived,
    Unavailable,
    WorkerLost,
)
from cluster.requests import RequestMachine, State
from core.hashing import extend_block_hashes, join_hashes, pack_token_ids, unpack_token_ids
from core.ids import Address, BlockHash, Incarnation, PoolRef, RequestId, WorkerRef
from core.messages.to_conductor import AttemptEnded, Placement, PrefillEnded, Rejection
from core.messages.to_decode import CancelDecode, DecodeRequest
from core.messages.to_gateway import FailureCode, PrefillStats, TokenEmitted
from core.messages.to_prefill import CancelPrefill, PrefillRequest
from core.requests import FinishReason, SamplingParams

REQUEST = RequestId(Incarnation("g"), 1)
ROOT = BlockHash(b"r" * 32)
PROMPT = tuple(range(10))
SIZE = 4
LIMITS = RetryLimits(max_failures=5, window_s=60, stall_s=30)
STATS = PrefillStats(6, 2, 2, 0.1, 0.2, 0.3)


def worker(name: str) -> WorkerRef:
    pool = PoolRef(name + "-pool", Incarnation(name + "-pool"), Address("h", 2))
    return WorkerRef(name, Incarnation(name), Address("h", 1), pool)


P, D, C = worker("p"), worker("d"), worker("c")


def placement(prefill: WorkerRef | None = P, decode: WorkerRef | None = D) -> Placement:
    return Placement(1, prefill, decode, (), 0.1, 0.1, "test")


class Text:
    """Token i reads `<i>`; `stop_at` ends the output with that token of the output."""

    def __init__(self, stop_at: int | None = None) -> None:
        self.stop_at = stop_at
        self.num = 0
        self.finished = False

    def push(self, token_id: int, *, ends_generation: bool) -> TextDelta:
        assert not self.finished
        self.num += 1
        return TextDelta(f"<{token_id}>", stopped=self.num - 1 == self.stop_at)

    def finish(self) -> TextDelta:
        assert not self.finished
        self.finished = True
        return TextDelta("", stopped=False)


class Machine(RequestMachine):
    """The machine, with actions that tests may look into without asking for their types."""

    def handle(self, event: Event) -> list[Any]:
        return super().handle(event)


def spec(**params) -> RequestSpec:
    hashes = tuple(extend_block_hashes(ROOT, PROMPT, SIZE))
    return RequestSpec(
        REQUEST, PROMPT, hashes, ROOT, SIZE, SamplingParams(**{"max_tokens": 5, **params})
    )


def machine(text: Text | None = None, limits: RetryLimits = LIMITS, **params) -> Machine:
    return Machine(spec(**params), text or Text(), limits)


def say(seq: int) -> int:
    return 1000 + seq


def token(m: Machine, seq: int, *, finish: FinishReason | None = None) -> TokenEmitted:
    return TokenEmitted(m.attempt, seq, say(seq), None, finish, STATS, ())


def placed(m: Machine, where: Placement | None = None) -> list[Any]:
    m.handle(Submitted(0.0))
    return m.handle(Placed(0.0, m.attempt, where or placement()))


def of(kind: type[Any], actions: list[Any]) -> list[Any]:
    return [a for a in actions if isinstance(a, kind)]


def told(kind: type[Any], actions: list[Any]) -> list[Any]:
    return [a.message for a in of(TellConductor, actions) if isinstance(a.message, kind)]


# --- the table ----------------------------------------------------------------------------------


def test_submission_asks_for_a_placement_of_all_known_tokens():
    (ask,) = machine().handle(Submitted(0.0))
    assert isinstance(ask, AskPlacement)
    assert ask.message.num_tokens == 10
    assert ask.message.num_new_tokens == 5
    assert ask.message.needs_decode
    assert ask.message.block_hashes == join_hashes(extend_block_hashes(ROOT, PROMPT, SIZE))


def test_placement_sends_both_requests_and_watches_for_a_stall():
    m = machine()
    to_prefill, to_decode, timer = placed(m)
    assert isinstance(to_prefill, SendToPrefill) and to_prefill.worker == P
    assert isinstance(to_decode, SendToDecode) and to_decode.worker == D
    assert isinstance(to_prefill.message, PrefillRequest)
    assert unpack_token_ids(to_prefill.message.token_ids) == PROMPT
    assert to_prefill.message.num_reusable_blocks == 2
    assert to_prefill.message.decode == D
    assert isinstance(to_decode.message, DecodeRequest) and to_decode.message.prefill == P
    assert to_decode.message.root == ROOT
    assert timer == SetTimer(30.0)
    assert m.state is State.PREFILLING


def test_a_coupled_placement_sends_only_the_decode_request():
    m = machine()
    sends = placed(m, placement(None, C))[:-1]
    assert [type(a) for a in sends] == [SendToDecode]
    assert sends[0].message.prefill is None


def test_the_last_prompt_token_is_never_reusable():
    m = Machine(replace(spec(), prompt_token_ids=PROMPT[:8],
                               block_hashes=spec().block_hashes[:2]), Text(), LIMITS)  # fmt: skip
    assert placed(m)[0].message.num_reusable_blocks == 1


def test_wanting_prompt_logprobs_turns_reuse_off_until_they_are_here():
    m = Machine(replace(spec(prompt_logprobs=1), reuse=False), Text(), LIMITS)
    first = placed(m)[0].message
    assert (first.num_reusable_blocks, first.params.prompt_logprobs) == (0, 1)
    m.handle(TokenReceived(1.0, token(m, 0)))
    m.handle(WorkerLost(1.0, D.incarnation))
    m.handle(TimerFired(1.0))
    again = m.handle(Placed(1.0, m.attempt, placement()))[0].message
    assert (again.num_reusable_blocks, again.params.prompt_logprobs) == (2, None)


def test_one_new_token_needs_no_decode_worker():
    m = machine(max_tokens=1)
    (ask,) = m.handle(Submitted(0.0))
    assert not ask.message.needs_decode
    actions = m.handle(Placed(0.0, m.attempt, placement(P, None)))
    assert actions[0].message.decode is None
    actions = m.handle(TokenReceived(1.0, token(m, 0, finish=FinishReason.LENGTH)))
    assert of(EndRequest, actions) == [EndRequest(Finished(FinishReason.LENGTH), "", 1)]


def test_a_first_rejection_for_load_is_the_answer():
    m = machine()
    m.handle(Submitted(0.0))
    actions = m.handle(Rejected(0.0, m.attempt, Rejection(1, "full", True, 7.0)))
    assert actions == [EndRequest(Overloaded(7.0), "", 0)]


def test_without_a_worker_a_new_request_waits_for_one_a_bounded_time():
    m = machine()
    m.handle(Submitted(0.0))
    now_s = 0.0
    actions: list[Any] = []
    while not of(EndRequest, actions):
        if m.state is State.PLACING:
            m.handle(Rejected(now_s, m.attempt, Rejection(1, "none", False, 1.0)))
        now_s += 1.0
        actions = m.handle(TimerFired(now_s))
    assert of(EndRequest, actions)[0].outcome == Unavailable(2.0)
    assert now_s == LIMITS.window_s + 1
    assert told(AttemptEnded, actions) == []


def test_a_later_rejection_waits_and_forgives_who_failed():
    m = machine()
    placed(m)
    m.handle(WorkerLost(1.0, P.incarnation))
    (ask,) = m.handle(TimerFired(1.0))
    assert ask.message.excluded == (P.incarnation,)
    (timer,) = m.handle(Rejected(1.0, m.attempt, Rejection(1, "none", False, 0.5)))
    assert timer == SetTimer(1.5)
    (ask,) = m.handle(TimerFired(1.5))
    assert ask.message.excluded == ()
    assert ask.message.attempt.attempt == 3


def test_a_silent_conductor_is_asked_again_until_the_window_is_over():
    m = machine()
    m.handle(Submitted(0.0))
    now_s, asked = 10.0, 1
    actions = m.handle(ConductorLost(now_s, m.attempt))
    assert told(AttemptEnded, actions) == [AttemptEnded(m.attempt, 0)]
    while not of(EndRequest, actions):
        if asks := of(AskPlacement, actions):
            asked += 1
            assert asks[0].message.attempt.attempt == asked
            actions = m.handle(ConductorLost(now_s, m.attempt))
        now_s += 10.0
        actions = m.handle(TimerFired(now_s))
    assert of(EndRequest, actions)[0].outcome == Unavailable(2.0)
    assert now_s == 80.0


def test_tokens_ahead_of_their_turn_are_held():
    m = machine()
    placed(m)
    assert m.handle(TokenReceived(0.0, token(m, 1))) == []
    assert m.state is State.PREFILLING
    actions = m.handle(TokenReceived(0.0, token(m, 0)))
    assert [a.token.seq for a in of(StreamToken, actions)] == [0, 1]
    assert told(PrefillEnded, actions) == [PrefillEnded(m.attempt, 6, 4, 0.1, 0.5)]


def test_duplicates_and_older_attempts_are_dropped():
    m = machine()
    placed(m)
    old = token(m, 0)
    m.handle(TokenReceived(0.0, old))
    assert m.handle(TokenReceived(0.0, old)) == []
    m.handle(WorkerLost(0.0, D.incarnation))
    m.handle(TimerFired(0.0))
    m.handle(Placed(0.0, m.attempt, placement()))
    assert m.handle(TokenReceived(0.0, replace(old, seq=1))) == []
    assert m.output_token_ids == [say(0)]


def test_a_retry_carries_prompt_and_emitted_tokens():
    m = machine()
    placed(m)
    for seq in range(3):
        m.handle(TokenReceived(0.0, token(m, seq)))
    m.handle(WorkerLost(5.0, D.incarnation))
    (ask,) = m.handle(TimerFired(5.0))
    known = (*PROMPT, say(0), say(1), say(2))
    assert ask.message.num_tokens == 13 and ask.message.num_new_tokens == 2
    assert ask.message.block_hashes == join_hashes(extend_block_hashes(ROOT, known, SIZE))
    message = m.handle(Placed(5.0, m.attempt, placement()))[0].message
    assert message.token_ids == pack_token_ids(known)
    assert message.num_output_tokens == 3


def test_losing_a_worker_cancels_at_the_other_and_ends_the_attempt():
    m = machine()
    placed(m)
    first = m.attempt
    actions = m.handle(WorkerLost(3.0, P.incarnation))
    assert actions == [
        SendToDecode(D, CancelDecode(first)),
        TellConductor(AttemptEnded(first, 0)),
        SetTimer(3.0),
    ]


def test_the_prefill_worker_is_not_needed_once_decode_gave_a_token():
    m = machine()
    placed(m)
    m.handle(TokenReceived(0.0, token(m, 0)))
    m.handle(TokenReceived(0.0, token(m, 1)))
    assert m.handle(WorkerLost(0.0, P.incarnation)) == []
    gone = AttemptGivenBack(0.0, m.attempt, FailureCode.TIMED_OUT, P.incarnation)
    assert m.handle(gone) == []
    assert m.state is State.DECODING


def test_the_prefill_worker_is_needed_until_decode_gave_a_token():
    m = machine()
    placed(m)
    m.handle(TokenReceived(0.0, token(m, 0)))
    m.handle(WorkerLost(0.0, P.incarnation))
    assert m.state is State.WAITING


def test_other_workers_do_not_matter():
    m = machine()
    placed(m)
    assert m.handle(WorkerLost(0.0, C.incarnation)) == []


def test_preemption_blames_nobody_and_may_happen_often():
    m = machine()
    m.handle(Submitted(0.0))
    for i in range(20):
        now_s = 100.0 * i
        m.handle(Placed(now_s, m.attempt, placement()))
        m.handle(AttemptGivenBack(now_s, m.attempt, FailureCode.PREEMPTED, D.incarnation))
        (ask,) = m.handle(TimerFired(now_s + 2.0))
        assert ask.message.excluded == ()


def test_failures_without_progress_are_bounded():
    m = machine()
    m.handle(Submitted(0.0))
    for i in range(LIMITS.max_failures):
        m.handle(Placed(i, m.attempt, placement()))
        actions = m.handle(AttemptGivenBack(i, m.attempt, FailureCode.TIMED_OUT, D.incarnation))
        m.handle(TimerFired(i + 2.0))
    assert of(EndRequest, actions)[0].outcome == Unavailable(2.0)


def test_peer_lost_blames_the_peer():
    m = machine()
    placed(m)
    m.handle(AttemptGivenBack(0.0, m.attempt, FailureCode.PEER_LOST, D.incarnation))
    (ask,) = m.handle(TimerFired(0.0))
    assert ask.message.excluded == (P.incarnation,)


def test_an_engine_error_is_tried_once_elsewhere():
    m = machine()
    placed(m)
    m.handle(AttemptGivenBack(0.0, m.attempt, FailureCode.ENGINE_ERROR, P.incarnation))
    (ask,) = m.handle(TimerFired(0.0))
    assert ask.message.excluded == (P.incarnation,)
    m.handle(Placed(0.0, m.attempt, placement(C, D)))
    actions = m.handle(AttemptGivenBack(0.0, m.attempt, FailureCode.ENGINE_ERROR, C.incarnation))
    assert of(EndRequest, actions)[0].outcome == EngineFailed()


def test_what_never_fits_ends_at_once():
    m = machine()
    placed(m)
    actions = m.handle(AttemptGivenBack(0.0, m.attempt, FailureCode.NEVER_FITS, P.incarnation))
    assert of(EndRequest, actions)[0].outcome == NeverFits()
    assert told(AttemptEnded, actions) == [AttemptEnded(m.attempt, 0)]


def test_no_token_within_the_stall_bound_is_a_failure():
    m = machine()
    placed(m)
    m.handle(TokenReceived(20.0, token(m, 0)))
    assert m.handle(TimerFired(30.0)) == [SetTimer(50.0)]
    actions = m.handle(TimerFired(50.0))
    assert told(AttemptEnded, actions) == [AttemptEnded(m.attempt, 1)]
    assert m.state is State.WAITING


def test_a_stop_string_ends_and_later_tokens_are_not_billed():
    m = machine(Text(stop_at=1))
    placed(m)
    m.handle(TokenReceived(0.0, token(m, 2)))
    m.handle(TokenReceived(0.0, token(m, 1)))
    actions = m.handle(TokenReceived(0.0, token(m, 0)))
    assert [a.token.seq for a in of(StreamToken, actions)] == [0, 1]
    assert of(EndRequest, actions) == [EndRequest(Finished(FinishReason.STOP), "", 2)]
    assert of(SendToDecode, actions) == [SendToDecode(D, CancelDecode(m.attempt))]
    assert of(SendToPrefill, actions) == [SendToPrefill(P, CancelPrefill(m.attempt))]
    assert told(AttemptEnded, actions) == [AttemptEnded(m.attempt, 2)]


def test_leaving_while_being_placed_ends_the_attempt_when_the_placement_comes():
    m = machine()
    m.handle(Submitted(0.0))
    assert m.handle(ClientGone(0.0)) == [EndRequest(Abandoned(), "", 0)]
    late = Placed(0.0, m.attempt, placement())
    assert m.handle(late) == [TellConductor(AttemptEnded(m.attempt, 0))]
    assert m.handle(late) == []


# --- random orders ------------------------------------------------------------------------------


class World:
    """Everything around one machine: who may still say what, and what was done so far."""

    def __init__(self, max_tokens: int, stop_at: int | None) -> None:
        self.m = machine(Text(stop_at), max_tokens=max_tokens)
        self.expected = min(max_tokens, max_tokens if stop_at is None else stop_at + 1)
        self.max_tokens = max_tokens
        self.now_s = 0.0
        self.inbox: list[Any] = []
        self.done: list[Any] = []
        self.coupled = False
        self.num_lives = 0

    def feed(self, event) -> None:
        for action in self.m.handle(event):
            self.done.append(action)
            self.react(action)

    def react(self, action) -> None:
        match action:
            case StreamToken(token):
                assert token.attempt == self.m.attempt
            case AskPlacement(message):
                self.num_lives += 1
                p, d = worker(f"p{self.num_lives}"), worker(f"d{self.num_lives}")
                if not message.needs_decode:
                    where = placement(p, None)
                else:
                    where = placement(None if self.coupled else p, d)
                self.inbox.append(lambda: Placed(self.now_s, message.attempt, where))
            case SendToPrefill(_, PrefillRequest() as r):
                self.emit(r.attempt, r.num_output_tokens, r.num_output_tokens + 1)
            case SendToDecode(_, DecodeRequest() as r):
                skip = 0 if r.prefill is None else 1
                self.emit(r.attempt, r.num_output_tokens + skip, self.max_tokens)
            case _:
                pass

    def emit(self, attempt, start: int, end: int) -> None:
        for seq in range(start, end):
            finish = FinishReason.LENGTH if seq + 1 == self.max_tokens else None
            made = TokenEmitted(attempt, seq, say(seq), None, finish, STATS, ())
            self.inbox.append(lambda made=made: TokenReceived(self.now_s, made))

    def drain(self) -> None:
        """Nothing goes wrong any more."""
        for _ in range(200):
            if self.m.state is State.ENDED and not self.inbox:
                return
            self.now_s += 1.0
            if self.inbox:
                self.feed(self.inbox.pop(0)())
            else:
                self.feed(TimerFired(self.now_s))
        raise AssertionError(f"does not end: {self.m.state}")

    def check(self) -> None:
        streamed = of(StreamToken, self.done)
        assert [a.token.seq for a in streamed] == list(range(len(streamed)))
        assert [a.token.token_id for a in streamed] == [say(i) for i in range(len(streamed))]
        (end,) = of(EndRequest, self.done)
        assert end.num_output_tokens == len(streamed)
        if isinstance(end.outcome, Finished):
            assert len(streamed) == self.expected
        asked = {a.message.attempt for a in of(AskPlacement, self.done)}
        ended = Counter(e.attempt for e in told(AttemptEnded, self.done))
        assert ended == dict.fromkeys(asked, 1)
        assert all(n == 1 for n in Counter(
            e.attempt for e in told(PrefillEnded, self.done)
        ).values())  # fmt: skip
        assert sum(e.num_output_tokens for e in told(AttemptEnded, self.done)) == len(streamed)


@settings(max_examples=120, deadline=None)
@given(data=st.data(), max_tokens=st.integers(1, 8), coupled=st.booleans())
def test_any_order_of_events_ends_once_without_lost_or_repeated_tokens(data, max_tokens, coupled):
    stop_at = data.draw(st.none() | st.integers(0, 7))
    world = World(max_tokens, stop_at)
    world.coupled = coupled
    world.feed(Submitted(0.0))
    for _ in range(data.draw(st.integers(0, 60))):
        world.now_s += data.draw(st.sampled_from([0.0, 0.01, 3.0]))
        m = world.m
        lives = [w.incarnation for w in m.workers()] or [Incarnation("x")]
        match data.draw(st.integers(0, 11)):
            case 0:
                lost = data.draw(st.sampled_from(lives))
                world.feed(WorkerLost(world.now_s, lost))
            case 1:
                code = data.draw(st.sampled_from(list(FailureCode)))
                by = data.draw(st.sampled_from(lives))
                world.feed(AttemptGivenBack(world.now_s, m.attempt, code, by))
            case 2:
                world.feed(TimerFired(world.now_s))
            case 3 if m.state is State.PLACING and len(world.inbox) and data.draw(st.booleans()):
                world.feed(ConductorLost(world.now_s, m.attempt))
            case 4 if data.draw(st.integers(0, 9)) == 0:
                world.feed(ClientGone(world.now_s))
            case _ if world.inbox:
                i = data.draw(st.integers(0, len(world.inbox) - 1))
                keep = data.draw(st.integers(0, 3)) == 0
                event = (world.inbox[i] if keep else world.inbox.pop(i))()
                world.feed(event)
            case _:
                pass
    world.drain()
    world.check()


@settings(max_examples=50, deadline=None)
@given(order=st.permutations(range(8)))
def test_tokens_in_any_order_stream_in_order(order):
    m = machine(max_tokens=8)
    placed(m)
    actions = []
    for seq in order:
        finish = FinishReason.LENGTH if seq == 7 else None
        actions += m.handle(TokenReceived(0.0, token(m, seq, finish=finish)))
    assert [a.token.seq for a in of(StreamToken, actions)] == list(range(8))
    assert len(of(EndRequest, actions)) == 1
