// The parameters of each operation: one struct each, raw pointers with shapes beside them.
//
// Strides count elements, as int64; the last dimension of every tensor of heads has stride 1.
// A layer's pages are keys [num_blocks, num_kv_heads, block_size, head_size] and values
// [num_blocks, num_kv_heads, block_size, value_head_size] of one pool; slot block * block_size +
// offset holds one token. Of latents only keys are stored: a value is the first elements of its
// key. data_plane/kernels/arguments.py checks shapes and types; the operations
// check the values of ids and lengths.
#pragma once

#include <cstdint>

#include "kvplane/dtype.h"

namespace kvplane {

struct PagesParams {
  void* data;  // the keys
  Dtype dtype;
  int64_t num_blocks;
  int64_t num_kv_heads;
  int64_t block_size;  // tokens
  int64_t head_size;
  int64_t value_head_size;  // at most head_size
  int64_t block_stride;     // of keys and of values
  int64_t kv_stride;        // from the first key to the first value; 0: values begin their keys
  int64_t head_stride;
  int64_t token_stride;
  int64_t value_head_stride;
  int64_t value_token_stride;
  // For 8-bit pages: round(key / scale) is stored, saturated, and stands for stored * scale. One
  // scale for each head, at any stride; stride 0 for one scale of all heads. Null: 1.
  const float* key_scales;
  const float* value_scales;
  int64_t key_scale_stride;
  int64_t value_scale_stride;
};

struct ReshapeAndCacheParams {
  const void* key;    // [num_tokens, num_kv_heads, head_size]
  const void* value;  // [num_tokens, num_kv_heads, value_head_size]; null: values begin their keys
  const int64_t* slots;  // [num_tokens]; negative: do not write
  PagesParams pages;
  Dtype key_dtype;
  Dtype value_dtype;
  int64_t num_tokens;
  int64_t key_token_stride;
  int64_t key_head_stride;
  int64_t value_token_stride;
  int64_t value_head_stride;
  int num_threads;  // at least 1
};

// Which blocks of keys a query sees, beside causality and a window: those whose index is less than
// `local_blocks` below that of the query's own block, and those that `seen` names for its head.
struct BlockMask {
  // [num_sequences, num_heads, num_blocks], or [1, ...]: whether a head sees a block; a row of
  // blocks repeats. Null: all are seen.
  const uint8_t* seen;
  int64_t sequence_stride;  // 0: the same for all sequences
  int64_t num_blocks;
  int64_t block_tokens;  // a multiple of kMaskUnit
  int64_t local_blocks;  // at least 1
};

constexpr int64_t kMaskUnit = 16;  // tokens

// kvplane/attention_options.py describes them.
struct AttentionOptions {
  float scale;
  int64_t sliding_window_tokens;  // 0: none
  const float* alibi_slopes;      // [num_heads]; may be null
  float logit_soft_cap;           // 0: none
  const float* sinks;             // [num_heads]; may be null
  BlockMask blocks;
};

struct PagedAttentionParams : AttentionOptions {
  const void* query;            // [num_tokens, num_heads, head_size]
  void* out;                    // [num_tokens, num_heads, value_head_size], contiguous
  float* lse;                   // [num_tokens, num_heads], contiguous; may be null
  const void* block_tables;     // [num_sequences, max_blocks], contiguous, int32 or int64
  const int64_t* query_starts;  // [num_sequences + 1], from 0 up to num_tokens
  const int64_t* context_lens;  // [num_sequences]; tokens with KV, those of this call included
  PagesParams pages;
  Dtype query_dtype;       // of query and out
  bool wide_block_tables;  // int64 when true
  bool is_padded;          // query_starts may end before num_tokens: later tokens have no sequence
  bool share_reads;  // read splits of equal blocks once for all their rows; no bit depends on it
  int64_t num_tokens;
  int64_t num_heads;  // a multiple of pages.num_kv_heads
  int64_t num_sequences;
  int64_t max_blocks;
  int64_t query_token_stride;
  int64_t query_head_stride;
  int num_threads;  // at least 1
  // For states of splits that are computed before the rest, on the CPU; no bit depends on it.
  int64_t max_state_bytes = int64_t{256} << 20;
};

// Whole blocks; the bytes of one block are contiguous.
struct CopyBlocksParams {
  const char* source;    // [source_num_blocks] blocks
  char* destination;     // [destination_num_blocks] blocks; may be source
  const int64_t* pairs;  // [num_pairs, 2]: from, to; copied in order
  int64_t num_pairs;
  int64_t source_num_blocks;
  int64_t destination_num_blocks;
  int64_t source_block_bytes;       // from one block to the next
  int64_t destination_block_bytes;  // from one block to the next
  int64_t copy_bytes;               // of one block
  int num_threads;                  // at least 1
};

// Between a block-major pool and the canonical order: layers before blocks.
struct PackBlocksParams {
  char* pool;                // [num_blocks, num_layers, page_bytes]
  char* blocks;              // [num_layers, num_block_ids, page_bytes], contiguous
  const int64_t* block_ids;  // [num_block_ids]
  int64_t num_block_ids;
  int64_t num_blocks;
  int64_t num_layers;
  int64_t block_bytes;  // from one block of the pool to the next
  int64_t page_bytes;   // of one layer of one block
};

// Pieces of memory to read, for measurements.
struct ReadRunsParams {
  const char* memory;
  const int64_t* offsets;  // [num_runs], bytes
  int64_t num_runs;
  int64_t run_bytes;     // a multiple of 64
  int64_t runs_of_item;  // that one thread reads one after another; at least 1
  int num_threads;       // at least 1
};

// All throw std::out_of_range, before anything is written, when an id or a length is out of range.
void reshape_and_cache(const ReshapeAndCacheParams& params);
void paged_attention(const PagedAttentionParams& params);
void copy_blocks(const CopyBlocksParams& params);
void gather_blocks(const PackBlocksParams& params);
void scatter_blocks(const PackBlocksParams& params);

// Returns the exclusive or of all words of 8 bytes.
uint64_t read_runs(const ReadRunsParams& params);

// For measurements: products that are added to sums, in registers, in many rounds of each thread.
// Returns how many it computed; 0 where the instruction set has no fused products.
int64_t fused_products(int64_t num_rounds, int num_threads);

}  // namespace kvplane
