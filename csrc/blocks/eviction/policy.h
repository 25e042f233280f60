#pragma once
#include <cstddef>
#include <cstdint>
namespace kvplane::blocks {
class EvictionPolicy {
 public:
  virtual ~EvictionPolicy() = default;
  virtual void set_time(double now_s) = 0;
  virtual void publish(uint32_t block, uint64_t key, uint32_t parent) = 0;
  virtual void use(const uint32_t* blocks, size_t num_blocks) = 0;
  virtual void add_idle(uint32_t block) = 0;
  virtual void remove_idle(uint32_t block) = 0;
  virtual uint32_t pop() = 0;
  virtual void unpublish(uint32_t block) = 0;
  virtual size_t num_idle() const = 0;
};
}  // namespace kvplane::blocks
