// What `check` of a class asks of its state.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>

namespace kvplane::blocks {

class Require {
 public:
  explicit Require(std::string of) : of_(std::move(of)) {}
  // Throws std::logic_error saying what is wrong, and with which one, unless it is `ok`.
  void operator()(bool ok, const char* what, int64_t which = -1) const {
    if (ok) return;
    throw std::logic_error(of_ + (which < 0 ? "" : ' ' + std::to_string(which)) + ": " + what);
  }

 private:
  std::string of_;
};

}  // namespace kvplane::blocks
