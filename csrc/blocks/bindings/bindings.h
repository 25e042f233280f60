// The contents of the module: each file of this folder adds its part.

#pragma once

#include <pybind11/pybind11.h>

namespace kvplane::blocks {

void bind_hashes(pybind11::module_& module);
void bind_codes(pybind11::module_& module);
void bind_pool(pybind11::module_& module);
// The operations of a step; after bind_pool.
void bind_steps(pybind11::module_& module);
// Answers to steps; after bind_pool.
void bind_answers(pybind11::module_& module);
// Retention, forgetting, watching and rebuilding; after bind_pool.
void bind_extras(pybind11::module_& module);

}  // namespace kvplane::blocks
