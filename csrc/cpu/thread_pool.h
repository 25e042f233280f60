// Runs independent items on the process's own threads, which sleep between calls.
#pragma once

#include <cstdint>
#include <functional>

namespace kvplane {

// Calls run(worker, item) once for each item in [0, num_items), worker in [0, num_workers). Any
// worker may get any item, so an item's result must not depend on the worker; `run` must not
// throw. The caller is worker 0; the others help once they are awake. Any number of threads may
// call this at once. If the system cannot start more threads, the existing ones do the work.
void parallel_for(int64_t num_items, int num_workers,
                  const std::function<void(int worker, int64_t item)>& run);

}  // namespace kvplane
