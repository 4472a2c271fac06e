"""The index of blocks by worker: streams, lives, the bound, and runs."""

from __future__ import annotations

from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st

from kvferry.block_changes import BlockChanges, NumberedChanges
from router.block_index import BlockIndex, KnownBlocks, Outcome

W1, W2 = "host:1", "host:2"


def name(number: int) -> bytes:
    return number.to_bytes(32, "big")


def names(*numbers: int) -> list[bytes]:
    return [name(number) for number in numbers]


class Stream:
    """Numbers the messages of one worker's life."""

    def __init__(self, index: BlockIndex, worker: str = W1, epoch: int = 1) -> None:
        self.index, self.worker, self.epoch, self.number = index, worker, epoch, 0
        assert self.send(is_reset=True) is Outcome.TAKEN

    def send(
        self, *, skip: int = 0, is_reset: bool = False, removed: Iterable[int] = (), stored: Iterable[int] = ()
    ) -> Outcome:
        """The next message, or the one that follows `skip` lost ones."""
        self.number += 1 + skip
        changes = BlockChanges(is_reset=is_reset, removed=names(*removed), stored=names(*stored))
        numbered = NumberedChanges(self.epoch, self.number, changes)
        return self.index.take(self.worker, numbered)


def test_runs_end_at_the_first_block_a_worker_lacks() -> None:
    index = BlockIndex()
    Stream(index, W1).send(stored=[1, 2, 4])
    Stream(index, W2).send(stored=[1])
    Stream(index, "host:3").send(stored=[2, 3])
    assert index.longest_run(names(1, 2, 3, 4)) == {W1: 2, W2: 1}
    assert index.longest_run(names(1, 2)) == {W1: 2, W2: 1}
    assert index.longest_run(names(9)) == index.longest_run([]) == {}


def test_removed_blocks_are_not_hit() -> None:
    index = BlockIndex()
    stream = Stream(index)
    stream.send(stored=[1, 2, 3])
    stream.send(removed=[2, 77])
    assert index.longest_run(names(1, 2, 3)) == {W1: 1}
    assert index.known(W1) == KnownBlocks(2, is_partial=False, epoch=1)
    stream.send(is_reset=True)
    assert index.known(W1) == KnownBlocks(0, is_partial=False, epoch=1)


def test_a_gap_costs_the_entry_until_the_stream_begins_anew() -> None:
    index = BlockIndex()
    stream = Stream(index)
    stream.send(stored=[1])
    assert stream.send(stored=[2], skip=1) is Outcome.GAP
    assert index.known(W1) == KnownBlocks()
    assert stream.send(stored=[3]) is Outcome.GAP, "what follows a gap means nothing"
    again = Stream(index)
    assert again.send(stored=[4]) is Outcome.TAKEN
    assert index.longest_run(names(4)) == {W1: 1}
    assert index.longest_run(names(1)) == {}


def test_a_message_that_comes_twice_is_a_gap() -> None:
    index = BlockIndex()
    stream = Stream(index)
    stream.send(stored=[1])
    stream.number -= 1
    assert stream.send(stored=[1]) is Outcome.GAP


def test_another_epoch_holds_nothing_of_the_old_one() -> None:
    """R124, as far as the index goes: also where nobody noticed that the old life ended."""
    index = BlockIndex()
    Stream(index, epoch=1).send(stored=[1, 2])
    Stream(index, W2, epoch=5).send(stored=[1, 2])
    late = NumberedChanges(2, 3, BlockChanges(stored=names(3)))
    assert index.take(W1, late) is Outcome.GAP
    Stream(index, epoch=2).send(stored=[7])
    assert index.known(W1) == KnownBlocks(1, is_partial=False, epoch=2)
    assert index.longest_run(names(1, 2)) == {W2: 2}


def test_a_lost_worker_is_forgotten_and_its_room_given_back() -> None:
    index = BlockIndex(max_blocks=3)
    Stream(index).send(stored=[1, 2, 3])
    Stream(index, W2).send(stored=[1])
    assert index.known(W2) == KnownBlocks(0, is_partial=True, epoch=1)
    index.forget(W1)
    index.forget("nobody")
    assert index.longest_run(names(1)) == {}
    Stream(index, W2).send(stored=[1, 2, 3])
    assert index.known(W2) == KnownBlocks(3, is_partial=False, epoch=1)


def test_a_stream_that_begins_anew_has_the_room_of_the_old_one() -> None:
    index = BlockIndex(max_blocks=2)
    for epoch in (1, 1, 2):
        Stream(index, epoch=epoch).send(stored=[1, 2])
        assert index.known(W1) == KnownBlocks(2, is_partial=False, epoch=epoch)


def test_beyond_the_bound_the_newest_are_left_out_and_it_shows() -> None:
    index = BlockIndex(max_blocks=4)
    stream = Stream(index)
    stream.send(stored=[1, 2, 3])
    assert not index.known(W1).is_partial
    stream.send(stored=[2, 4, 5, 6])
    assert index.known(W1) == KnownBlocks(4, is_partial=True, epoch=1)
    assert index.longest_run(names(1, 2, 3, 4, 5)) == {W1: 4}
    stream.send(removed=[5, 1])
    stream.send(stored=[7])
    assert index.known(W1) == KnownBlocks(4, is_partial=True, epoch=1), "6 is still missing"
    stream.send(is_reset=True)
    stream.send(stored=[6])
    assert index.known(W1) == KnownBlocks(1, is_partial=False, epoch=1)


def test_hashes_known_already_need_no_room() -> None:
    index = BlockIndex(max_blocks=2)
    stream = Stream(index)
    stream.send(stored=[1, 2])
    stream.send(stored=[2, 1])
    assert index.known(W1) == KnownBlocks(2, is_partial=False, epoch=1)


Step = tuple[str, str, list[int]]
STEPS = st.tuples(
    st.sampled_from(["stored", "stored", "removed", "reset", "forget", "restart"]),
    st.sampled_from([W1, W2]),
    st.lists(st.integers(0, 12), max_size=6),
)


@given(st.lists(STEPS, max_size=30), st.integers(1, 12))
def test_the_index_is_right_and_bounded_whatever_comes(steps: list[Step], max_blocks: int) -> None:
    """Against plain sets: never a block that is not there; all of them while nothing is marked partial."""
    index = BlockIndex(max_blocks)
    streams, truth, epoch = dict[str, Stream](), dict[str, set[int]](), 0
    for kind, worker, numbers in steps:
        if kind == "forget":
            index.forget(worker)
            streams.pop(worker, None)
            truth.pop(worker, None)
        elif kind == "restart" or worker not in streams:
            epoch += 1
            streams[worker], truth[worker] = Stream(index, worker, epoch), set()
        elif kind == "reset":
            assert streams[worker].send(is_reset=True) is Outcome.TAKEN
            truth[worker] = set()
        elif kind == "stored":
            assert streams[worker].send(stored=numbers) is Outcome.TAKEN
            truth[worker] |= set(numbers)
        else:
            assert streams[worker].send(removed=numbers) is Outcome.TAKEN
            truth[worker] -= set(numbers)
        for one in (W1, W2):
            found = {number for number in range(13) if one in index.longest_run([name(number)])}
            known, true = index.known(one), truth.get(one, set())
            assert len(found) == known.num_blocks
            assert found <= true if known.is_partial else found == true
        assert sum(index.known(one).num_blocks for one in (W1, W2)) <= max_blocks
