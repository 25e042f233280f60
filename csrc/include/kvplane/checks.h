// Range checks on ids and lengths.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace kvplane {

// Throws std::out_of_range with "<name> must be ..., is ..." unless low <= value < high.
template <typename Name>
void require_in_range(int64_t value, int64_t low, int64_t high, const Name& name) {
  if (value >= low && value < high) return;
  throw std::out_of_range(name() + " must be at least " + std::to_string(low) + " and below " +
                          std::to_string(high) + ", is " + std::to_string(value));
}

inline std::string at(const char* name, int64_t i) {
  return std::string(name) + "[" + std::to_string(i) + "]";
}

inline std::string at(const char* name, int64_t i, int64_t j) {
  return std::string(name) + "[" + std::to_string(i) + ", " + std::to_string(j) + "]";
}

}  // namespace kvplane
