#pragma once
#include <memory>
#include <stdexcept>
#include <string>

#include "core/lists.h"
#include "eviction/policy.h"
namespace kvplane::blocks {
class Lru final : public EvictionPolicy {
 public:
  explicit Lru(uint32_t n) : links_(n) {}
  void set_time(double) override {}
  void publish(uint32_t, uint64_t, uint32_t) override {}
  void use(const uint32_t*, size_t) override {}
  void add_idle(uint32_t b) override { links_.push_back(list_, b); }
  void remove_idle(uint32_t b) override { links_.remove(list_, b); }
  uint32_t pop() override { return links_.pop_front(list_); }
  void unpublish(uint32_t) override {}
  size_t num_idle() const override { return list_.size; }

 private:
  Links links_;
  List list_;
};
inline std::unique_ptr<EvictionPolicy> make_policy(const std::string& name, uint32_t n) {
  if (name != "lru") throw std::invalid_argument("no eviction policy is called " + name);
  return std::make_unique<Lru>(n);
}
}  // namespace kvplane::blocks
