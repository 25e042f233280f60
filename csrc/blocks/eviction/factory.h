// Policies by name.
#pragma once

#include <memory>
#include <string>

#include "eviction/policy.h"

namespace kvplane::blocks {

// "lru" or "reuse-rate". Throws std::invalid_argument for any other name.
std::unique_ptr<EvictionPolicy> make_policy(const std::string& name, uint32_t num_blocks);

}  // namespace kvplane::blocks
