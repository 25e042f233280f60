#include <pybind11/typing.h>

#include "bindings/bindings.h"
#include "core/block_times.h"

PYBIND11_MODULE(_native, module) {
  using kvplane::blocks::Durations;
  kvplane::blocks::bind_hashes(module);
  kvplane::blocks::bind_codes(module);
  kvplane::blocks::bind_pool(module);
  kvplane::blocks::bind_rebuild(module);
  module.def("duration_bounds_s", [] {
    pybind11::typing::List<double> bounds;
    for (const double bound : Durations::kBounds) bounds.append(bound);
    return bounds;
  });
}
