"""Log-probabilities of tokens by transformers alone, and a check of those that were told."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from kvferry.sampling import TokenLogprob
from proto.kvferry.v1 import types_pb2

TOLERANCE = 1e-4
NUM_TOP = 3


class Truth:
    """The reference: transformers alone, eager, float32, the whole prompt at once."""

    def __init__(self, folder: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", local_files_only=True
        )

    @torch.inference_mode()
    def rows(self, token_ids: SequenceOf[int]) -> Tensor:
        """Row i: log-probabilities of the token at place i + 1."""
        logits: Tensor = self._model(torch.tensor([list(token_ids)])).logits[0]
        return logits.float().log_softmax(dim=1)

    def check(
        self,
        token_ids: SequenceOf[int],
        told: SequenceOf[TokenLogprob | types_pb2.TokenLogprob],
        *,
        first_index: int = 1,
        num_top: int = NUM_TOP,
        others: SequenceOf[int] = (),
    ) -> None:
        """Every place from `first_index` on, once, with its rank and its alternatives: the likeliest, or `others`."""
        assert len(told) == len(token_ids) - first_index
        rows = self.rows(token_ids)
        for place, one in enumerate(told, first_index):
            row = rows[place - 1]
            assert one.token_id == token_ids[place]
            assert one.logprob == pytest.approx(row[token_ids[place]].item(), abs=TOLERANCE)
            is_above, is_near = row > one.logprob + TOLERANCE, row >= one.logprob - TOLERANCE
            assert int(is_above.sum()) < one.rank <= int(is_near.sum())
            top = one.top if isinstance(one, types_pb2.TokenLogprob) else one.alternatives
            wanted = row[list(others)] if others else row.topk(num_top).values
            assert [other.logprob for other in top] == pytest.approx(wanted.tolist(), abs=TOLERANCE)
            ids = [other.token_id for other in top]
            assert ids == list(others) if others else row[ids].tolist() == pytest.approx(wanted.tolist(), abs=TOLERANCE)
