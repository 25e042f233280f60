#include "eviction/idle_tree.h"

#include <utility>

namespace kvplane::blocks {

void IdleTree::publish(uint32_t block, uint32_t parent) {
  if (++last_serial_ == 0) last_serial_ = 1;
  nodes_[block] = {parent, parent == kNoBlock ? 0 : nodes_[parent].serial, last_serial_, 0};
}

uint32_t IdleTree::set_parent(uint32_t block, uint32_t parent) {
  Node& node = nodes_[block];
  node.parent = parent;
  node.parent_serial = nodes_[parent].serial;
  return node.counts ? count_up(parent) : kNoBlock;
}

uint32_t IdleTree::add_idle(uint32_t block) {
  Node& node = nodes_[block];
  node.counts += 1;
  ++num_idle_;
  return node.num_idle_children() ? kNoBlock : count_up(parent_of(node));
}

uint32_t IdleTree::remove_idle(uint32_t block) {
  Node& node = nodes_[block];
  node.counts -= 1;
  --num_idle_;
  return node.num_idle_children() ? kNoBlock : count_down(parent_of(node));
}

uint32_t IdleTree::unpublish(uint32_t block) {
  Node& node = nodes_[block];
  node.serial = 0;
  return node.num_idle_children() ? count_down(parent_of(node)) : kNoBlock;
}

uint32_t IdleTree::count_up(uint32_t parent) {
  while (parent != kNoBlock) {
    Node& node = nodes_[parent];
    const uint32_t before = std::exchange(node.counts, node.counts + 2);
    if (before > 1) return kNoBlock;
    if (before) return parent;  // it is idle
    parent = parent_of(node);
  }
  return kNoBlock;
}

uint32_t IdleTree::count_down(uint32_t parent) {
  while (parent != kNoBlock) {
    Node& node = nodes_[parent];
    node.counts -= 2;
    if (node.num_idle_children()) return kNoBlock;
    if (node.idle()) return parent;
    parent = parent_of(node);
  }
  return kNoBlock;
}

}  // namespace kvplane::blocks
