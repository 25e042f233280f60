// Multiplies and adds in registers and does nothing else: the limit of the kernels' arithmetic.

#include <atomic>

#include "kvplane/params.h"
#include "row_ops.h"
#include "thread_pool.h"

namespace kvplane {

int64_t fused_products(int64_t num_rounds, int num_threads) {
  const RowOps& ops = row_ops();
  if (ops.fused_products == nullptr) return 0;
  constexpr int64_t kItemsOfThread = 4;  // a thread that was asleep may do fewer
  const int64_t num_items = kItemsOfThread * num_threads;
  std::atomic<float> any{0.0f};  // so that no compiler leaves the loop out
  parallel_for(num_items, num_threads, [&](int, int64_t) {
    any.store(ops.fused_products(num_rounds), std::memory_order_relaxed);
  });
  return num_items * num_rounds * ops.products_of_round;
}

}  // namespace kvplane
