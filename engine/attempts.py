"""The sequences that live in one engine: by their id, and by the attempt whose choices or beams they are.

    enter ─► (fork ─► more of the attempt) ─► leave, one by one, or all of an attempt at once

Whoever leaves is out of queue and batch, and its blocks are free.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from engine.block_manager import BlockManager
from engine.forward_batch import SampledToken
from engine.outputs import TokenSampled
from engine.scheduler import Scheduler
from engine.sequence import Sequence, SequenceStatus


class Attempts:
    """Living sequences.

    Attributes:
        by_id: all of them by `Sequence.seq_id`.
    """

    def __init__(self, scheduler: Scheduler, block_manager: BlockManager) -> None:
        self.by_id: dict[str, Sequence] = {}
        self._by_owner: dict[str, list[Sequence]] = {}
        self._scheduler = scheduler
        self._block_manager = block_manager

    def enter(self, sequence: Sequence) -> None:
        """Takes a sequence into the books."""
        self.by_id[sequence.seq_id] = sequence
        self._by_owner.setdefault(sequence.owner_id, []).append(sequence)

    def leave(self, sequence: Sequence) -> None:
        """Ends one sequence and frees its blocks."""
        del self.by_id[sequence.seq_id]
        living = self._by_owner[sequence.owner_id]
        living.remove(sequence)
        if not living:
            del self._by_owner[sequence.owner_id]
        self._scheduler.remove(sequence)
        self._block_manager.free(sequence)
        sequence.status = SequenceStatus.FINISHED

    def remove(self, owner_id: str) -> list[Sequence]:
        """Ends all sequences of an attempt in whatever state they are; an unknown id does nothing."""
        sequences = list(self._by_owner.get(owner_id, ()))
        for sequence in sequences:
            self.leave(sequence)
        return sequences

    def remove_choice(self, owner_id: str, choice: int) -> list[Sequence]:
        """Ends one choice of an attempt, or keeps it from beginning; returns the sequences that ended."""
        ended: list[Sequence] = []
        for sequence in list(self._by_owner.get(owner_id, ())):
            if sequence.num_choices > 1:
                sequence.stopped_choices.add(choice)
            elif sequence.choice == choice:
                self.leave(sequence)
                ended.append(sequence)
        return ended

    def fork(self, sequence: Sequence, seq_id: str, choice: int) -> Sequence:
        """One more sequence of the attempt, which shares all blocks of `sequence`; it has no place in the batch yet."""
        fork = self._block_manager.fork(sequence, seq_id, choice)
        self.enter(fork)
        return fork

    def start(self, fork: Sequence) -> None:
        """Into the batch, or into the queue where the batch has no place: there it is recomputed, mostly from hits."""
        if self._scheduler.num_seats_taken < self._scheduler.max_running:
            self._scheduler.start(fork)
        else:
            self._block_manager.free(fork)
            self._scheduler.add(fork)

    def start_beam(self, fork: Sequence) -> None:
        """Into the batch: a gang has its places since its prompt was admitted."""
        self._scheduler.start(fork)

    def fork_choices(self, sequence: Sequence, tokens: SequenceOf[SampledToken], at_ns: int) -> list[TokenSampled]:
        """Every choice goes on with its own next token, sharing all blocks.

        Choices that their token ended, or that were stopped before, do not; the last one takes `sequence` with it.
        """
        outputs = [one for one in token_outputs(sequence, tokens, at_ns) if one.choice not in sequence.stopped_choices]
        living = [one for one in outputs if one.finish is None]
        sequence.num_choices = 1
        if not living:
            self.leave(sequence)
            return outputs
        forks = [self.fork(sequence, f"{sequence.owner_id}#{one.choice}", one.choice) for one in living[1:]]
        sequence.choice = living[0].choice
        for one, own in zip(living, (sequence, *forks), strict=True):
            own.token_ids.append(one.token_id)
        for fork in forks:
            self.start(fork)
        return outputs


def token_outputs(sequence: Sequence, tokens: SequenceOf[SampledToken], at_ns: int) -> list[TokenSampled]:
    """What is told of the next token of each choice of `sequence`, before it is appended."""
    index, sampling = sequence.num_output_tokens, sequence.sampling
    return [
        TokenSampled(
            sequence.owner_id,
            index,
            token.token_id,
            sampling.finish_after(token.token_id, index + 1),
            at_ns,
            choice,
            token.logprob,
        )
        for choice, token in enumerate(tokens, start=sequence.choice)
    ]
