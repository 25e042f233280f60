// The contents of the module: each file of this folder adds its part.

#pragma once

#include <pybind11/pybind11.h>

#include "pool/pool.h"

namespace kvplane::blocks {

using PoolClass = pybind11::class_<Pool>;
using GroupClass = pybind11::class_<LayerGroup>;

void bind_hashes(pybind11::module_& module);
void bind_codes(pybind11::module_& module);
void bind_layer_group(GroupClass& group);
void bind_pool(pybind11::module_& module);
// The operations of a step, and the calls that follow its plan.
void bind_steps(PoolClass& pool);
// Answers to steps.
void bind_answers(PoolClass& pool);
// Searches for cached prefixes.
void bind_searches(pybind11::module_& module, PoolClass& pool);
void bind_rebuild(pybind11::module_& module);

// States of sequences of the group: all where no ids are given.
pybind11::tuple states_of(const LayerGroup& group, SessionHandle handle,
                          const pybind11::object& sequence_ids);

}  // namespace kvplane::blocks
