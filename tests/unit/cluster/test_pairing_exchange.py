"""Codes as people type them, the life of an invitation, and what the exchange gives to whom."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exo_train.cluster.pairing import (
    INVITATION_S,
    MAX_ADMISSION_BYTES,
    MAX_CODE_CHARS,
    MAX_NUMBER,
    MAX_REQUEST_BYTES,
    MAX_TRIES,
    SPAKE_BYTES,
    Closed,
    Code,
    Invitation,
    InviterExchange,
    JoinerExchange,
    WrongCodeError,
)
from exo_train.cluster.words import WORDS
from exo_train.errors import ConfigError, ProtocolError

CODE = Code(number=7, words=("maple", "tiger"))
CODES = st.builds(
    Code, number=st.integers(1, MAX_NUMBER), words=st.tuples(*[st.sampled_from(WORDS)] * 2)
)


def entropy(seed: str) -> Callable[[int], bytes]:
    """Give the same bytes for the same seed."""
    return lambda num_bytes: hashlib.shake_256(seed.encode()).digest(num_bytes)


def one_letter_apart(one: str, two: str) -> bool:
    if len(one) == len(two):
        return sum(a != b for a, b in zip(one, two, strict=True)) == 1
    short, long = sorted((one, two), key=len)
    return any(long[:n] + long[n + 1 :] == short for n in range(len(long)))


def test_the_words_are_easily_told_apart() -> None:
    assert len(WORDS) == len(set(WORDS)) == 256
    assert all(word.isascii() and word.isalpha() and word.islower() for word in WORDS)
    assert all(3 <= len(word) <= 8 for word in WORDS)
    assert len({word[:4] for word in WORDS}) == len(WORDS)
    assert not [pair for pair in itertools.combinations(WORDS, 2) if one_letter_apart(*pair)]


@given(CODES)
def test_a_printed_code_can_be_typed(code: Code) -> None:
    assert Code.parse(str(code)) == code


@pytest.mark.parametrize(
    "typed",
    ["7-maple-tiger", " 7 Maple TIGER\n", "7.maple.tiger", "07--maple_tiger", "7maple, tiger"],
)
def test_typing_is_forgiven(typed: str) -> None:
    assert Code.parse(typed) == CODE


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        ("7-mapel-tiger", "'mapel' is not a word.*nearest one is 'maple'"),
        ("7-maple-tigre", "nearest one is 'tiger'"),
        ("7-maple-老虎", "'老虎' is not a word"),
        ("0-maple-tiger", "between 1 and 99, got 0"),
        ("100-maple-tiger", "between 1 and 99, got 100"),
        ("maple-tiger", "a number and 2 words, like 7-maple-tiger"),
        ("7-maple", "a number and 2 words"),
        ("7-maple-tiger-tiger", "a number and 2 words"),
        ("٧-maple-tiger", "a number and 2 words"),
        ("", "a number and 2 words"),
        ("7-maple-tiger" + " " * MAX_CODE_CHARS, "a number and 2 words"),
        ("9" * 99, "a number and 2 words"),
    ],
)
def test_a_mistyped_code_is_explained(typed: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        Code.parse(typed)


def test_codes_are_drawn_from_all_numbers_and_words() -> None:
    asked: list[int] = []

    def last(below: int) -> int:
        asked.append(below)
        return below - 1

    assert str(Code.choose(last)) == f"99-{WORDS[-1]}-{WORDS[-1]}"
    assert str(Code.choose(lambda below: 0)) == f"1-{WORDS[0]}-{WORDS[0]}"
    assert sorted(asked) == [99, 256, 256]
    assert len({Code.choose() for _ in range(20)}) > 10


def test_an_invitation_lives_ten_minutes() -> None:
    invitation = Invitation(CODE, now_s=100.0)
    assert INVITATION_S == 600
    assert invitation.closed(699.9) is None
    assert invitation.closed(700.0) is Closed.EXPIRED
    assert invitation.closed(100.0) is Closed.EXPIRED, "a clock that goes back opens nothing"


def test_an_invitation_bears_two_wrong_tries() -> None:
    invitation = Invitation(CODE, now_s=0.0)
    for _ in range(MAX_TRIES - 1):
        invitation.wrong_try()
        assert invitation.closed(1.0) is None
    invitation.wrong_try()
    assert MAX_TRIES == 3
    assert invitation.closed(1.0) is Closed.WRONG_TRIES


def test_the_first_reason_stays() -> None:
    invitation = Invitation(CODE, now_s=0.0)
    invitation.close(Closed.PAIRED)
    invitation.close(Closed.ENDED)
    for _ in range(MAX_TRIES):
        invitation.wrong_try()
    assert invitation.closed(9999.0) is Closed.PAIRED


def exchanges(
    code: Code = CODE, other: Code = CODE, protocol: int = 2
) -> tuple[JoinerExchange, InviterExchange]:
    joiner = JoinerExchange(code, protocol=2, entropy=entropy("joiner"))
    return joiner, InviterExchange(other, protocol=protocol, entropy=entropy("inviter"))


def test_the_right_code_carries_both_messages() -> None:
    joiner, inviter = exchanges()
    sealed = joiner.prove(inviter.answer(joiner.first), b"my key")
    assert inviter.open(sealed) == b"my key"
    admission = inviter.seal(b"your certificate")
    assert joiner.open(admission) == b"your certificate"
    assert b"my key" not in sealed
    assert b"certificate" not in admission


@pytest.mark.parametrize(
    "other",
    [
        Code(number=7, words=("maple", "zebra")),
        Code(number=7, words=("tiger", "maple")),
        Code(number=8, words=("maple", "tiger")),
    ],
    ids=str,
)
def test_another_code_opens_nothing(other: Code) -> None:
    joiner, inviter = exchanges(other=other)
    sealed = joiner.prove(inviter.answer(joiner.first), b"my key")
    with pytest.raises(WrongCodeError):
        inviter.open(sealed)
    with pytest.raises(WrongCodeError):
        joiner.open(inviter.seal(b"anything"))


def test_another_protocol_version_opens_nothing() -> None:
    joiner, inviter = exchanges(protocol=3)
    with pytest.raises(WrongCodeError):
        inviter.open(joiner.prove(inviter.answer(joiner.first), b"my key"))


def test_a_recorded_pairing_is_no_use_against_a_new_exchange() -> None:
    joiner, inviter = exchanges()
    recorded = joiner.prove(inviter.answer(joiner.first), b"my key")
    again = InviterExchange(CODE, protocol=2)
    again.answer(joiner.first)
    with pytest.raises(WrongCodeError):
        again.open(recorded)


def test_every_changed_byte_is_noticed() -> None:
    for place in range(0, SPAKE_BYTES + 6 + 16, 5):
        joiner, inviter = exchanges()
        answer = bytearray(inviter.answer(joiner.first))
        if place < SPAKE_BYTES:
            answer[place] ^= 4
        try:
            sealed = bytearray(joiner.prove(bytes(answer), b"my key"))
        except ProtocolError:
            continue  # it was no point of the curve any more
        if place >= SPAKE_BYTES:
            sealed[place - SPAKE_BYTES] ^= 4
        with pytest.raises(WrongCodeError):
            inviter.open(bytes(sealed))
    joiner, inviter = exchanges()
    inviter.open(joiner.prove(inviter.answer(joiner.first), b"my key"))
    admission = bytearray(inviter.seal(b"admission"))
    admission[-1] ^= 1
    with pytest.raises(WrongCodeError):
        joiner.open(bytes(admission))


def test_an_admission_belongs_to_the_request_that_it_answers() -> None:
    """Were it not bound, a middleman could let a device believe that another key was admitted."""
    joiner, inviter = exchanges()
    inviter.open(joiner.prove(inviter.answer(joiner.first), b"my key"))
    admission = inviter.seal(b"admission")
    other, inviter = exchanges()
    other.prove(inviter.answer(other.first), b"MY KEY")
    with pytest.raises(WrongCodeError):
        other.open(admission)


def test_what_was_sealed_one_way_does_not_open_the_other() -> None:
    joiner, inviter = exchanges()
    sealed = joiner.prove(inviter.answer(joiner.first), b"my key")
    with pytest.raises(WrongCodeError):
        joiner.open(sealed)


def test_the_directions_have_keys_of_their_own() -> None:
    """One key with one nonce for two messages would give away the difference between them."""
    joiner, inviter = exchanges()
    request = joiner.prove(inviter.answer(joiner.first), bytes(64))
    inviter.open(request)
    assert inviter.seal(bytes(64))[:64] != request[:64]


def halves() -> dict[str, bytes]:
    joiner, inviter = exchanges()
    return {
        "nothing": b"",
        "zeros": bytes(SPAKE_BYTES),
        "no point": b"A" + b"\xff" * 32,
        "the neutral point": b"A\x01" + bytes(31),
        "a point of small order": b"A" + bytes(32),
        "the own half": inviter._answer,
        "the own half, turned": b"A" + inviter._answer[1:],
        "the wrong side": b"B" + joiner.first[1:],
        "no side": b"S" + joiner.first[1:],
        "a byte less": joiner.first[:-1],
        "a byte more": joiner.first + b"\0",
        "a lot": bytes(1 << 20),
    }


@pytest.mark.parametrize("half", halves())
def test_a_half_that_nobody_would_send_is_refused(half: str) -> None:
    _, inviter = exchanges()
    with pytest.raises(ProtocolError, match="a pairing message"):
        inviter.answer(halves()[half])


def test_messages_are_bounded() -> None:
    joiner, inviter = exchanges()
    joiner.prove(inviter.answer(joiner.first), b"my key")
    with pytest.raises(ProtocolError, match=f"{MAX_REQUEST_BYTES + 16} allowed"):
        inviter.open(bytes(MAX_REQUEST_BYTES + 17))
    with pytest.raises(ProtocolError, match=f"{MAX_ADMISSION_BYTES + 16} allowed"):
        joiner.open(bytes(MAX_ADMISSION_BYTES + 17))
