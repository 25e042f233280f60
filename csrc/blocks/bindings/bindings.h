// The contents of the module: each file of this folder adds its part.

#pragma once

#include <pybind11/pybind11.h>

#include "pool/pool.h"

namespace kvplane::blocks {

using PoolClass = pybind11::class_<Pool>;
using GroupClass = pybind11::class_<LayerGroup>;

void bind_hashes(pybind11::module_& module);
void bind_codes(pybind11::module_& module);
void bind_layer_group(pybind11::module_& module);
void bind_pool(pybind11::module_& module);
// The operations of a step, and the calls that follow its plan.
void bind_steps(PoolClass& pool);
// Answers to steps.
void bind_answers(PoolClass& pool);
void bind_rebuild(pybind11::module_& module);

// States of sequences of the group: all where no ids are given.
pybind11::tuple states_of(const LayerGroup& group, SessionHandle handle,
                          const pybind11::object& sequence_ids);
// How many of the entries that were found lie in each tier, and their hashes.
pybind11::tuple matched(const LayerGroup& group, const std::vector<EntryId>& found);

}  // namespace kvplane::blocks
