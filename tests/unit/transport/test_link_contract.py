"""What every link does, whatever carries it."""

from __future__ import annotations

import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from exo_train.errors import InterruptedRunError, PeerLostError, ProtocolError
from exo_train.transport.base import Link, LinkLimits, Tag
from exo_train.wire.tensor import DType, HostTensor


def tensor(fill: int, num_values: int = 6) -> HostTensor:
    return HostTensor(DType.BF16, (2, num_values // 2), bytes([fill]) * 2 * num_values)


def test_tensors_go_both_ways_and_are_found_by_tag(make_pair) -> None:
    lower, upper = make_pair()
    for i in range(4):
        lower.send(Tag(1, i), tensor(i))
        upper.send(Tag(1, i), tensor(100 + i))
    for i in (3, 0, 2, 1):
        up, down = (
            upper.wait_recv(Tag(1, i), timeout_s=5),
            lower.wait_recv(Tag(1, i), timeout_s=5),
        )
        assert (up.dtype, up.shape, bytes(up.data)) == (DType.BF16, (2, 3), bytes([i]) * 12)
        assert bytes(down.data) == bytes([100 + i]) * 12
    assert (lower.sent_bytes, upper.received_bytes) == (48, 48)
    assert (upper.sent_bytes, lower.received_bytes) == (48, 48)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2)])
def test_scalars_and_empty_tensors_travel(make_pair, shape: tuple[int, ...]) -> None:
    lower, upper = make_pair()
    lower.send(Tag(0, 0), HostTensor(DType.FP32, shape, bytes(0 if 0 in shape else 4)))
    assert upper.wait_recv(Tag(0, 0), timeout_s=5).shape == shape


@pytest.mark.parametrize(
    ("receiver", "words"),
    [(1, r"the activation from mac \(rank 0\)"), (0, r"the gradient from pc \(rank 1\)")],
)
def test_a_deadline_names_peer_direction_step_and_microbatch(make_pair, receiver, words) -> None:
    link = make_pair()[receiver]
    start_s = time.monotonic()
    with pytest.raises(PeerLostError, match=rf"Waited 0\.[23] s for {words}, step 7, microbatch 3"):
        link.wait_recv(Tag(7, 3), timeout_s=0.2)
    assert time.monotonic() - start_s < 1


def test_the_sender_blocks_when_the_receiver_takes_nothing(make_pair) -> None:
    limits = LinkLimits(outbox_tensors=2, mailbox_tensors=3, send_timeout_s=0.3)
    lower, upper = make_pair(limits)
    big = HostTensor(DType.FP32, (4 << 20,), bytes(16 << 20))  # more than gRPC itself buffers
    sent = 0

    def send_until_stuck() -> None:
        nonlocal sent
        for sent in range(100):
            lower.send(Tag(1, sent), big)

    with pytest.raises(PeerLostError, match=r"pc \(rank 1\) took nothing for 0\.[34] s while 2"):
        send_until_stuck()
    # Outbox and mailbox, one being written, one being read.
    assert 5 <= sent <= 2 + 3 + 2
    for i in range(sent):
        upper.wait_recv(Tag(1, i), timeout_s=5)
    lower.send(Tag(1, sent), big)
    assert upper.wait_recv(Tag(1, sent), timeout_s=5).num_bytes == 16 << 20


def test_fail_wakes_all_waiters_with_the_reason(make_pair) -> None:
    lower, upper = make_pair(LinkLimits(outbox_tensors=1, mailbox_tensors=1, send_timeout_s=60))

    def send_until_stuck() -> None:
        for i in range(100):
            lower.send(Tag(1, i), HostTensor(DType.FP32, (4 << 20,), bytes(16 << 20)))

    with ThreadPoolExecutor(4) as pool:
        waits = [pool.submit(lower.wait_recv, Tag(5, i), timeout_s=60) for i in range(3)]
        waits.append(pool.submit(send_until_stuck))
        time.sleep(0.3)
        start_s = time.monotonic()
        lower.fail(InterruptedRunError("attic-pc asked to stop"))
        errors = [wait.exception(timeout=5) for wait in waits]
    assert time.monotonic() - start_s < 1
    assert {type(error) for error in errors} == {InterruptedRunError}
    assert all(str(error).startswith("attic-pc asked to stop (") for error in errors)
    assert "gradient from pc (rank 1), step 5, microbatch 2" in str(errors[2])
    # The other end learns of it too, and not as a clean close.
    with pytest.raises(PeerLostError, match=r"mac \(rank 0\).* broke"):
        wait_for_end(upper)


def wait_for_end(link: Link) -> None:
    for i in range(100, 200):
        link.wait_recv(Tag(1, i), timeout_s=2)


def test_a_clean_close_delivers_what_was_sent_and_says_so(make_pair) -> None:
    lower, upper = make_pair()
    lower.send(Tag(1, 0), tensor(1))
    lower.close()
    assert bytes(upper.wait_recv(Tag(1, 0), timeout_s=5).data) == bytes([1]) * 12
    with pytest.raises(PeerLostError, match=r"mac \(rank 0\) closed the link"):
        upper.wait_recv(Tag(1, 1), timeout_s=5)
    with pytest.raises(PeerLostError, match="closed the link"):
        upper.send(Tag(1, 0), tensor(1))
    with pytest.raises(PeerLostError, match="closed here"):
        lower.send(Tag(1, 1), tensor(1))


def test_the_upper_end_can_close_first(make_pair) -> None:
    lower, upper = make_pair()
    upper.send(Tag(1, 0), tensor(9))
    upper.close()
    assert bytes(lower.wait_recv(Tag(1, 0), timeout_s=5).data) == bytes([9]) * 12
    with pytest.raises(PeerLostError, match=r"pc \(rank 1\) closed the link"):
        lower.wait_recv(Tag(1, 1), timeout_s=5)


@pytest.mark.parametrize(
    ("tags", "sentence"),
    [
        ([Tag(5, 1), Tag(5, 1)], "the activation of step 5, microbatch 1 twice"),
        ([Tag(5, 0)], "the activation of step 5, microbatch 0 twice"),
        ([Tag(4, 9)], "step 4, microbatch 9, but step 5 is running"),
        ([Tag(500, 0)], "step 500, microbatch 0, but step 5 is running"),
    ],
    ids=["repeated", "repeated after it was taken", "stale", "far ahead"],
)
def test_tags_that_cannot_be_right_break_the_link(make_pair, tags, sentence) -> None:
    lower, upper = make_pair()
    lower.send(Tag(5, 0), tensor(0))
    upper.wait_recv(Tag(5, 0), timeout_s=5)
    for tag in tags:
        lower.send(tag, tensor(0))
    with pytest.raises(ProtocolError, match=re.escape(sentence)):
        upper.wait_recv(Tag(5, 50), timeout_s=5)


def test_a_tensor_above_the_limit_is_refused_by_the_sender(make_pair) -> None:
    lower, _ = make_pair(LinkLimits(max_tensor_bytes=11))
    with pytest.raises(ProtocolError, match=r"has 12 bytes \(limit 11 .*smaller microbatch"):
        lower.send(Tag(0, 0), tensor(0))


def test_no_thread_outlives_a_closed_link(make_pair) -> None:
    lower, upper = make_pair()
    lower.close()
    upper.close()
    deadline_s = time.monotonic() + 3
    while stuck := [t.name for t in threading.enumerate() if t.name.startswith("link ")]:
        assert time.monotonic() < deadline_s, stuck
        time.sleep(0.05)
