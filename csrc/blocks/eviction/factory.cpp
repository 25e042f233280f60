#include "eviction/factory.h"

#include <stdexcept>

#include "eviction/lru.h"
#include "eviction/reuse/reuse_rate.h"

namespace kvplane::blocks {

std::unique_ptr<EvictionPolicy> make_policy(const std::string& name, uint32_t num_blocks) {
  if (name == "lru") return std::make_unique<LeastRecentlyUsed>(num_blocks);
  if (name == "reuse-rate") return std::make_unique<ReuseRate>(num_blocks);
  throw std::invalid_argument("no eviction policy is called " + name);
}

}  // namespace kvplane::blocks
