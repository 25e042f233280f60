"""Which files there are: a tree by names, in the order of use.

    root ──► block ──► block ──► block         a block's file is there only while its parent's is,
                  └──► block                   so what is found is always a whole prefix

The one to evict is found as by a clock's hand: the least recently used, unless another hangs from
it, which lets it pass.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from data_plane.files.record import BlockKey


@dataclass(slots=True)
class _Node:
    parent: bytes
    children: set[bytes] = field(default_factory=set)


class FileIndex:
    """Not thread-safe. Names are of 32 bytes."""

    def __init__(self) -> None:
        self._nodes: OrderedDict[bytes, _Node] = OrderedDict()  # the least recently used first
        self._roots: dict[bytes, set[bytes]] = {}
        self._roots_of: dict[bytes, set[bytes]] = {}  # by tenant
        self._tenants: dict[bytes, bytes] = {}  # by root

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, name: object) -> bool:
        return name in self._nodes

    def may_add(self, key: BlockKey) -> bool:
        """Whether its parent is there."""
        return key.parent == key.root or key.parent in self._nodes

    def add(self, key: BlockKey) -> None:
        """Add a file, whose parent is there."""
        if key.name in self._nodes:
            return
        self._nodes[key.name] = _Node(key.parent)
        if key.parent == key.root:
            self._roots.setdefault(key.root, set()).add(key.name)
            self._roots_of.setdefault(key.tenant, set()).add(key.root)
            self._tenants[key.root] = key.tenant
        else:
            self._nodes[key.parent].children.add(key.name)

    def use(self, name: bytes) -> bool:
        """Whether the file is there; it counts as used now."""
        if name not in self._nodes:
            return False
        self._nodes.move_to_end(name)
        return True

    def oldest(self, keep: bytes = b"") -> bytes | None:
        """The one to evict, but not ``keep``; None where there is no other."""
        for _ in range(len(self._nodes)):
            name = next(iter(self._nodes))
            if not self._nodes[name].children and name != keep:
                return name
            self._nodes.move_to_end(name)
        return None

    def remove(self, name: bytes) -> list[bytes]:
        """Remove a file and all below it, if it is there; their names, parents first."""
        node = self._nodes.get(name)
        if node is None:
            return []
        if node.parent in self._nodes:
            self._nodes[node.parent].children.discard(name)
        elif (firsts := self._roots.get(node.parent)) is not None:
            firsts.discard(name)
            if not firsts:
                self._drop_root(node.parent)
        removed = [name]
        for each in removed:
            removed += self._nodes.pop(each).children
        return removed

    def remove_root(self, root: bytes) -> list[bytes]:
        """Remove all of a namespace; the names."""
        return [name for first in [*self._roots.get(root, ())] for name in self.remove(first)]

    def remove_tenant(self, tenant: bytes) -> list[bytes]:
        """Remove all of a tenant; the names."""
        roots = [*self._roots_of.get(tenant, ())]
        return [name for root in roots for name in self.remove_root(root)]

    def remove_all(self) -> list[bytes]:
        """Remove everything; the names."""
        names = [*self._nodes]
        self._nodes.clear()
        self._roots.clear()
        self._roots_of.clear()
        self._tenants.clear()
        return names

    def _drop_root(self, root: bytes) -> None:
        del self._roots[root]
        tenant = self._tenants.pop(root)
        self._roots_of[tenant].discard(root)
        if not self._roots_of[tenant]:
            del self._roots_of[tenant]

    def check_integrity(self) -> None:
        """Raise AssertionError unless the tree is whole."""
        for name, node in self._nodes.items():
            above = self._nodes.get(node.parent)
            names = self._roots[node.parent] if above is None else above.children
            assert name in names, "a file is not known to its parent"
            assert node.children <= self._nodes.keys(), "a child is not there"
        assert set().union(*self._roots.values()) <= self._nodes.keys(), "a first block is missing"
        assert set().union(*self._roots_of.values()) == self._roots.keys(), "a root has no tenant"
        assert self._tenants.keys() == self._roots.keys(), "a tenant is kept of no root"
