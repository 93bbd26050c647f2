"""The pairing code, what it may be used for, and the exchange that proves it on both sides.

Owns the cryptography of pairing: SPAKE2 (RFC 9382), then one sealed message each way. Pure: no
socket, file or clock; randomness comes from functions passed in.
"""

from __future__ import annotations

import difflib
import enum
import hashlib
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from spake2 import SPAKE2_A, SPAKE2_B, SPAKEError
from spake2.ed25519_basic import NotOnCurve

from exo_train.cluster.words import WORDS
from exo_train.errors import ConfigError, ProtocolError

INVITATION_S = 600.0
MAX_TRIES = 3
MAX_NUMBER = 99
NUM_WORDS = 2
MAX_CODE_CHARS = 100
SPAKE_BYTES = 33  # the side, then a point of Ed25519
MAX_REQUEST_BYTES = 1024
# A roster at its limits has about 600 KB.
MAX_ADMISSION_BYTES = 1 << 20

_KEY_BYTES = 32
_TAG_BYTES = 16
# Each key seals one message, so that the nonce may be fixed.
_NONCE = bytes(12)

# What an inviter says in plain text, where anybody may listen; the joiner has the sentences.
REFUSED_NUMBER = "number"
REFUSED_CLOSED = "closed"
REFUSED_CODE = "wrong code"
REFUSED_ADMISSION = "not admitted"

Entropy = Callable[[int], bytes]


class WrongCodeError(ProtocolError):
    """A sealed message does not open: the other side has another code, or somebody changed it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Code:
    """Like 7-maple-tiger: the number says which invitation is meant, the words are the secret."""

    number: int
    words: tuple[str, ...]

    @classmethod
    def choose(cls, below: Callable[[int], int] = secrets.randbelow) -> Code:
        """Make a code; `below(n)` gives a number in [0, n)."""
        words = tuple(WORDS[below(len(WORDS))] for _ in range(NUM_WORDS))
        return cls(number=1 + below(MAX_NUMBER), words=words)

    @classmethod
    def parse(cls, text: str) -> Code:
        """Read a code as people type it; raises ConfigError with the nearest word."""
        parts = re.findall(r"\d+|[^\W\d_]+", text[:MAX_CODE_CHARS].lower())
        numbers = [part for part in parts[:1] if part.isascii() and part.isdigit()]
        if len(text) > MAX_CODE_CHARS or len(parts) != 1 + NUM_WORDS or not numbers:
            raise ConfigError(
                f"a code is a number and {NUM_WORDS} words, like 7-maple-tiger, got "
                f"{text[:MAX_CODE_CHARS]!r}; ask for it again where `exo-train invite` printed it"
            )
        for word in parts[1:]:
            if word not in WORDS:
                near = difflib.get_close_matches(word, WORDS, n=1, cutoff=0.0)[0]
                raise ConfigError(
                    f"'{word}' is not a word of pairing codes; the nearest one is '{near}'"
                )
        number = int(numbers[0])
        if not 1 <= number <= MAX_NUMBER:
            raise ConfigError(f"a code's number is between 1 and {MAX_NUMBER}, got {number}")
        return cls(number=number, words=tuple(parts[1:]))

    def __str__(self) -> str:
        return "-".join((str(self.number), *self.words))


class Closed(enum.Enum):
    """Why an invitation is over."""

    PAIRED = "paired"
    EXPIRED = "expired"
    WRONG_TRIES = "three wrong tries"
    REPLACED = "replaced by another code"
    NOT_ADMITTED = "the device could not be admitted"
    ENDED = "the agent ends"


class Invitation:
    """A code's life: some minutes, three wrong tries, one device.

    Only a sealed proof counts as a try: nobody learns anything about the words before it.
    """

    def __init__(self, code: Code, *, now_s: float, lifetime_s: float = INVITATION_S) -> None:
        self.code = code
        self.expires_s = now_s + lifetime_s
        self._num_wrong = 0
        self._closed: Closed | None = None

    def closed(self, now_s: float) -> Closed | None:
        """Give why it is over; None while it lives. What is over once stays over."""
        if self._closed is None and now_s >= self.expires_s:
            self._closed = Closed.EXPIRED
        return self._closed

    def wrong_try(self) -> None:
        self._num_wrong += 1
        if self._num_wrong >= MAX_TRIES:
            self.close(Closed.WRONG_TRIES)

    def failed(self) -> None:
        """Say that the device with the right code did not become a member after all."""
        self._closed = Closed.NOT_ADMITTED

    def close(self, why: Closed) -> None:
        """End it; the first reason stays."""
        self._closed = self._closed or why


class JoinerExchange:
    """The side that typed the code: `first` → `prove` → `open`, each used once."""

    def __init__(self, code: Code, *, protocol: int, entropy: Entropy = secrets.token_bytes):
        ids = _ids(code, protocol)
        self._spake = SPAKE2_A(_password(code), *ids, entropy_f=entropy)
        self.first: bytes = self._spake.start()
        self._keys: _Keys | None = None
        self._request = b""

    def prove(self, answer: bytes, request: bytes) -> bytes:
        """Seal the request with the key that the inviter's answer gives; raises ProtocolError."""
        self._keys = _finish(self._spake, answer, self.first + answer)
        self._request = self._keys.seal_request(request)
        return self._request

    def open(self, sealed: bytes) -> bytes:
        """Give the admission; raises WrongCodeError unless the one with our code sealed it."""
        assert self._keys is not None, "prove comes first"
        return self._keys.open_admission(sealed, after=self._request)


class InviterExchange:
    """The side that printed the code: `answer` → `open` → `seal`, each used once."""

    def __init__(self, code: Code, *, protocol: int, entropy: Entropy = secrets.token_bytes):
        ids = _ids(code, protocol)
        self._spake = SPAKE2_B(_password(code), *ids, entropy_f=entropy)
        self._answer: bytes = self._spake.start()
        self._keys: _Keys | None = None
        self._request = b""

    def answer(self, first: bytes) -> bytes:
        """Give our half; raises ProtocolError when the joiner's is none."""
        self._keys = _finish(self._spake, first, first + self._answer)
        return self._answer

    def open(self, sealed: bytes) -> bytes:
        """Give the request; raises WrongCodeError when the joiner does not have the code."""
        assert self._keys is not None, "answer comes first"
        self._request = sealed
        return self._keys.open_request(sealed)

    def seal(self, admission: bytes) -> bytes:
        """Seal the admission for the one whose request was opened."""
        assert self._keys is not None, "open comes first"
        return self._keys.seal_admission(admission, after=self._request)


@dataclass(frozen=True, slots=True)
class _Keys:
    """A key for each direction, and all that was said before as associated data."""

    request: ChaCha20Poly1305
    admission: ChaCha20Poly1305
    transcript: bytes

    def seal_request(self, request: bytes) -> bytes:
        return self.request.encrypt(_NONCE, request, self.transcript)

    def open_request(self, sealed: bytes) -> bytes:
        return _open(self.request, sealed, self.transcript, max_bytes=MAX_REQUEST_BYTES)

    def seal_admission(self, admission: bytes, *, after: bytes) -> bytes:
        return self.admission.encrypt(_NONCE, admission, self._after(after))

    def open_admission(self, sealed: bytes, *, after: bytes) -> bytes:
        return _open(self.admission, sealed, self._after(after), max_bytes=MAX_ADMISSION_BYTES)

    def _after(self, sealed_request: bytes) -> bytes:
        return self.transcript + hashlib.sha256(sealed_request).digest()


def _password(code: Code) -> bytes:
    """Give the secret part; the number goes over the wire in plain text."""
    return "-".join(code.words).encode("ascii")


def _ids(code: Code, protocol: int) -> tuple[bytes, bytes]:
    """Name both sides (RFC 9382, section 3.3), so that a key means this use, version and number."""
    joiner, inviter = (
        f"exo-train pairing {protocol} {side} {code.number}".encode("ascii")
        for side in ("joiner", "inviter")
    )
    return joiner, inviter


def _finish(spake: SPAKE2_A | SPAKE2_B, message: bytes, transcript: bytes) -> _Keys:
    """Compute the shared keys; raises ProtocolError for bytes that are no other side's half."""
    if len(message) != SPAKE_BYTES:
        raise ProtocolError(f"a pairing message has {len(message)} bytes, not {SPAKE_BYTES}")
    try:
        secret = spake.finish(message)
    except (SPAKEError, NotOnCurve, ValueError, AssertionError):
        raise ProtocolError("a pairing message is not what the other side would send") from None
    derived = HKDF(
        algorithm=SHA256(), length=2 * _KEY_BYTES, salt=None, info=b"exo-train pairing keys"
    ).derive(secret)
    return _Keys(
        ChaCha20Poly1305(derived[:_KEY_BYTES]), ChaCha20Poly1305(derived[_KEY_BYTES:]), transcript
    )


def _open(cipher: ChaCha20Poly1305, sealed: bytes, transcript: bytes, *, max_bytes: int) -> bytes:
    if len(sealed) > max_bytes + _TAG_BYTES:
        raise ProtocolError(
            f"a sealed pairing message has {len(sealed)} bytes, more than the "
            f"{max_bytes + _TAG_BYTES} allowed"
        )
    try:
        return cipher.decrypt(_NONCE, sealed, transcript)
    except InvalidTag:
        raise WrongCodeError("the other device does not have this code") from None
