"""Block hashes: what the root depends on, and the chain."""

from __future__ import annotations

import itertools

from kvferry.block_hash import hash_block, hash_blocks, hash_root
from kvferry.kv_layout import KvLayout

LAYOUT = KvLayout(
    num_layers=2, num_kv_heads=1, head_dim=4, block_size=4, dtype="float32", model_fingerprint="fingerprint"
)


def test_every_field_of_the_root_counts_and_none_can_pass_for_another() -> None:
    roots = {
        str(fields): hash_root(LAYOUT, **fields)
        for fields in (
            {},
            {"adapter": "x"},
            {"cache_salt": "x"},
            {"tenant": "x"},
            {"shared_salt": "x"},
            {"tenant": "x", "cache_salt": "x"},
            {"cache_salt": "x", "shared_salt": "x"},
            {"tenant": "xy"},
            {"adapter": "x", "tenant": "y"},
            {"adapter": "xy"},
        )
    }
    for (one, root), (other, other_root) in itertools.combinations(roots.items(), 2):
        assert root != other_root, f"{one} and {other}"


def test_a_shared_salt_takes_the_tenants_place() -> None:
    assert hash_root(LAYOUT, tenant="a", shared_salt="s") == hash_root(LAYOUT, tenant="b", shared_salt="s")
    assert hash_root(LAYOUT, tenant="a", shared_salt="s") != hash_root(LAYOUT, tenant="a", shared_salt="t")
    assert hash_root(LAYOUT, tenant="a") != hash_root(LAYOUT, tenant="b", shared_salt="a")


def test_the_chain_has_a_hash_for_each_full_block_that_depends_on_all_before() -> None:
    root = hash_root(LAYOUT)
    tokens = list(range(10))
    hashes = hash_blocks(root, tokens, 4)
    assert hashes == [hash_block(root, tokens[:4]), hash_block(hash_block(root, tokens[:4]), tokens[4:8])]
    assert hash_blocks(root, [9, *tokens[1:]], 4)[1] != hashes[1]
