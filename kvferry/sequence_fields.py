"""Which fields of a sequence a worker knows, so that none is given one that it would overlook.

Protobuf hands on what it does not know without a word: an older worker would sample without the grammar, and say OK.
So every worker tells the fields that its own messages have, and a router sends a sequence only to workers that know all
it sets. What is unset takes no part: while workers are replaced one by one, requests without the new field go anywhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from proto.kvferry.v1 import worker_pb2

_BEFORE_IT_WAS_TOLD = {
    "": "id token_ids num_prompt_tokens sampling tier_rank deadline_unix_ms cache_salt adapter bypass_prefix_cache"
    " choice num_choices beam tenant shared_salt",
    "id.": "request_id attempt",
    "beam.": "width length_penalty early_stopping num_returned",
    "sampling.": "max_tokens temperature top_k top_p min_p seed min_tokens ignore_eos eos_token_ids"
    " stop_token_ids logprobs",
}
FIRST_FIELDS = frozenset(path + name for path, names in _BEFORE_IT_WAS_TOLD.items() for name in names.split())
"""What a worker that tells none knows for certain: those of the first workers of wire version 2. Never to grow."""


def own_fields() -> frozenset[str]:
    """Paths of all fields of SequenceSpec here, `sampling.grammar` one of them."""
    return frozenset(_paths(worker_pb2.SequenceSpec.DESCRIPTOR))


def set_fields(message: Message, prefix: str = "") -> frozenset[str]:
    """Paths of the fields that are set in a message, those of the messages in it included."""
    paths: set[str] = set()
    for field, value in message.ListFields():
        path = prefix + field.name
        paths.add(path)
        if _has_fields(field):
            for inner in value if field.is_repeated else [value]:
                paths |= set_fields(inner, f"{path}.")
    return frozenset(paths)


def _paths(message: Any, prefix: str = "") -> Iterator[str]:
    """Of a descriptor; protobuf has two classes of them, of which the stubs know one."""
    for field in message.fields:
        yield prefix + field.name
        if _has_fields(field):
            yield from _paths(field.message_type, f"{prefix}{field.name}.")


def _has_fields(field: FieldDescriptor) -> bool:
    """Whether its values are messages, the entries of a map apart."""
    return field.message_type is not None and not field.message_type.GetOptions().map_entry
