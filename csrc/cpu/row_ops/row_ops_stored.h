// Attention over keys and values of 16 and 8 bits as they are stored, in fp32 with fused products
// and sums. For files of an instruction set, after row_ops_vector.h.
//
//   unit     2 * kWidth columns: what one load of stored numbers becomes, two registers of fp32. In
//            memory they alternate (bf16, 8 bits: even columns and odd ones) or follow one another
//            (fp16); queries and outputs have their columns in the same order
//   scores   kWidth sums at a time, of kRows rows and kWidth / kRows tokens; each starts at 0 and
//            adds a row's products unit by unit, so it does not depend on the rows beside it
//   values   columns of kRows rows, each of which adds token after token
//   8 bits   become fp16 by shifts, and fp32 by F16C: e5m2 is the upper half of an fp16; e4m3 gets
//            the exponent of an fp16, which is 2^-8 of the number. With many rows, a tile is
//            converted once for all of them
#pragma once

#include "row_ops_vector.h"
#include "stored_types.h"

// Of what is large and has many variants.
#define KVPLANE_NOINLINE __attribute__((noinline))

namespace kvplane {
namespace {

// Rows to prefetch during a pass over a tile, some lines at each step: all at once would fill the
// memory queue and stall. kUnits, kLines: of a row; 0 when known only at run time.
template <int kUnits, int kLines>
struct Ahead {
  static constexpr int kUnitsOfRow = kUnits;
  static constexpr int kLinesOfRow = kLines;
  const char* const* rows;  // [kTileTokens]
  int64_t row_bytes;

  KVPLANE_INLINE void fetch(int64_t row, int64_t line) const {
    prefetch_line(rows[row] + 64 * line);
  }

  KVPLANE_INLINE void fetch_row(int64_t row) const {
    for (int64_t line = 0; 64 * line < row_bytes; ++line) fetch(row, line);
  }
};

struct NothingAhead {
  static constexpr int kLinesOfRow = -1;
};

// Step `step` of kSteps for each kRows rows from `row` on.
template <int kRows, int kSteps, typename Rows>
KVPLANE_INLINE void fetch_step(const Rows& ahead, int64_t row, int step) {
  constexpr int kLines = Rows::kLinesOfRow;
  if constexpr (kLines > 0) {
    constexpr int kAll = kRows * kLines;
    KVPLANE_UNROLL for (int i = 0; i < (kAll + kSteps - 1) / kSteps; ++i) {
      const int line = step * kAll / kSteps + i;
      if (line < (step + 1) * kAll / kSteps) ahead.fetch(row + line / kLines, line % kLines);
    }
  } else if constexpr (kLines == 0) {
    if (step > 0) return;
    KVPLANE_UNROLL for (int i = 0; i < kRows; ++i) ahead.fetch_row(row + i);
  }
}

// kUnits: of a row, 0 when known only at run time.
template <typename Source, int kRows, int kUnits, typename Rows>
KVPLANE_NOINLINE void stored_dot_products(const Row* rows, const char* const* keys,
                                          int64_t row_size, const Rows& ahead,
                                          float (*dots)[kTileTokens]) {
  constexpr int kTokensAtOnce = kWidth / kRows;
  const int64_t num_units = kUnits > 0 ? kUnits : row_size / kUnitColumns;
  for (int64_t t = 0; t < kTileTokens; t += kTokensAtOnce) {
    Vector sums[kWidth] = {};  // [kRows, kTokensAtOnce]
    KVPLANE_UNROLL for (int64_t u = 0; u < num_units; ++u) {
      fetch_step<kTokensAtOnce, (kUnits > 0 ? kUnits : 1)>(ahead, t, static_cast<int>(u));
      const auto query = [&](int r, int half) __attribute__((always_inline)) {
        const float* from = static_cast<const float*>(rows[r].query);
        return hold(load_vector(from + u * kUnitColumns + half * kWidth));
      };
      if constexpr (kRows <= 2) {
        Vector q[kRows][2];
        KVPLANE_UNROLL for (int r = 0; r < kRows; ++r) {
          KVPLANE_UNROLL for (int half = 0; half < 2; ++half) q[r][half] = query(r, half);
        }
        KVPLANE_UNROLL for (int i = 0; i < kTokensAtOnce; ++i) {
          Vector first, second;
          Source::load(keys[t + i], u, &first, &second);
          KVPLANE_UNROLL for (int r = 0; r < kRows; ++r) {
            Vector& sum = sums[r * kTokensAtOnce + i];
            sum = fused(second, q[r][1], fused(first, q[r][0], sum));
          }
        }
      } else {
        Vector k[2][kTokensAtOnce];
        KVPLANE_UNROLL for (int i = 0; i < kTokensAtOnce; ++i) {
          Source::load(keys[t + i], u, &k[0][i], &k[1][i]);
        }
        KVPLANE_UNROLL for (int half = 0; half < 2; ++half) {
          KVPLANE_UNROLL for (int r = 0; r < kRows; ++r) {
            const Vector q = query(r, half);
            KVPLANE_UNROLL for (int i = 0; i < kTokensAtOnce; ++i) {
              Vector& sum = sums[r * kTokensAtOnce + i];
              sum = fused(k[half][i], q, sum);
            }
          }
        }
      }
    }
    const auto partial = [&](int64_t i)
                             __attribute__((always_inline)) { return PerRow<1>{{sums[i]}}; };
    float all[kWidth];
    store_vector(totals<kWidth, 1>(0, partial).row[0], all);
    KVPLANE_UNROLL for (int r = 0; r < kRows; ++r) {
      std::memcpy(dots[r] + t, all + r * kTokensAtOnce, sizeof(float) * kTokensAtOnce);
    }
  }
}

// The same for six rows of a converted tile, with registers of 8 lanes: 12 sums, as many as 16
// registers leave room for, so that the units never wait for a sum and each load is used more
// often.
template <int kUnits, typename Rows>
KVPLANE_NOINLINE void dot_products_of_six(const Row* rows, const char* const* keys,
                                          int64_t row_size, const Rows& ahead,
                                          float (*dots)[kTileTokens]) {
  constexpr int kSix = 6, kTokensAtOnce = 2;
  const int64_t num_halves = kUnits > 0 ? 2 * kUnits : 2 * row_size / kUnitColumns;
  Vector partial[kSix][kWidth];
  for (int64_t t = 0; t < kTileTokens; t += kTokensAtOnce) {
    const float* key[kTokensAtOnce];
    KVPLANE_UNROLL for (int i = 0; i < kTokensAtOnce; ++i) {
      key[i] = reinterpret_cast<const float*>(keys[t + i]);
    }
    Vector sums[kSix][kTokensAtOnce] = {};
    KVPLANE_UNROLL for (int64_t h = 0; h < num_halves; ++h) {
      if (h % 2 == 0) {
        fetch_step<kTokensAtOnce, (kUnits > 0 ? kUnits : 1)>(ahead, t, static_cast<int>(h / 2));
      }
      Vector k[kTokensAtOnce];
      KVPLANE_UNROLL for (int i = 0; i < kTokensAtOnce; ++i) {
        k[i] = hold(load_vector(key[i] + h * kWidth));
      }
      KVPLANE_UNROLL for (int r = 0; r < kSix; ++r) {
        const Vector q = hold(load_vector(static_cast<const float*>(rows[r].query) + h * kWidth));
        KVPLANE_UNROLL for (int i = 0; i < kTokensAtOnce; ++i) {
          sums[r][i] = fused(k[i], q, sums[r][i]);
        }
      }
    }
    const int64_t at = t % kWidth;
    KVPLANE_UNROLL for (int r = 0; r < kSix; ++r) {
      KVPLANE_UNROLL for (int i = 0; i < kTokensAtOnce; ++i) partial[r][at + i] = sums[r][i];
    }
    if (at + kTokensAtOnce < kWidth) continue;
    for (int r = 0; r < kSix; ++r) {
      const auto sum = [&](int64_t i)
                           __attribute__((always_inline)) { return PerRow<1>{{partial[r][i]}}; };
      store_vector(totals<kWidth, 1>(0, sum).row[0], dots[r] + t - at);
    }
  }
}

// At token t of a pass over kUnits units of all values, so that the passes together fetch each row
// in order.
template <int kUnits, typename Rows>
KVPLANE_INLINE void fetch_part(const Rows& ahead, int64_t pass, int64_t t) {
  constexpr int kLines = Rows::kLinesOfRow;
  if constexpr (kLines > 0) {
    // As many passes as there are parts of rows; where rows have more units, the first ones.
    constexpr int kPasses = Rows::kUnitsOfRow / kUnits;
    constexpr int kParts = kPasses < 1 ? 1 : kPasses < kLines ? kPasses : kLines;
    if (pass >= kParts) return;
    const int64_t part = pass * kTileTokens + t;
    KVPLANE_UNROLL for (int i = 0; i < kLines / kParts; ++i) {
      ahead.fetch(part / kParts, part % kParts * (kLines / kParts) + i);
    }
  } else if constexpr (kLines == 0) {
    if (pass == 0) ahead.fetch_row(t);
  }
}

// Adds the weighted values of tokens [begin, end), which all kRows rows see, to kUnits units of
// columns from `column` on.
template <typename Source, int kRows, int kUnits, typename Fetch>
KVPLANE_INLINE void add_stored_values(const Row* rows, const float (*weights)[kTileTokens],
                                      const float* corrections, const char* const* values,
                                      int64_t column, int64_t begin, int64_t end,
                                      const Fetch& fetch) {
  Vector sums[kRows][2 * kUnits];
  KVPLANE_UNROLL for (int r = 0; r < kRows; ++r) {
    KVPLANE_UNROLL for (int i = 0; i < 2 * kUnits; ++i) {
      sums[r][i] = load_vector(rows[r].out + column + i * kWidth) * corrections[r];
    }
  }
  for (int64_t t = begin; t < end; ++t) {
    fetch(t);
    KVPLANE_UNROLL for (int u = 0; u < kUnits; ++u) {
      Vector first, second;
      Source::load(values[t], column / kUnitColumns + u, &first, &second);
      KVPLANE_UNROLL for (int r = 0; r < kRows; ++r) {
        const Vector weight = all_lanes(weights[r][t]);
        sums[r][2 * u] = fused(first, weight, sums[r][2 * u]);
        sums[r][2 * u + 1] = fused(second, weight, sums[r][2 * u + 1]);
      }
    }
  }
  KVPLANE_UNROLL for (int r = 0; r < kRows; ++r) {
    KVPLANE_UNROLL for (int i = 0; i < 2 * kUnits; ++i) {
      store_vector(sums[r][i], rows[r].out + column + i * kWidth);
    }
  }
}

template <typename Source, int kRows, typename Rows>
KVPLANE_NOINLINE void add_all_stored_values(const Row* rows, const float (*weights)[kTileTokens],
                                            const float* corrections, const char* const* values,
                                            int64_t value_size, const Rows& ahead) {
  // As many sums as leave registers for the rest.
  constexpr int kUnits = kWidth == 16 ? (kRows == 4 ? 2 : 4) : kRows > 4 ? 1 : 4 / kRows;
  const int64_t begin = rows[0].begin, end = rows[0].end;
  int64_t column = 0;
  for (int64_t pass = 0; column + kUnits * kUnitColumns <= value_size; ++pass) {
    add_stored_values<Source, kRows, kUnits>(
        rows, weights, corrections, values, column, begin, end,
        [&](int64_t t) __attribute__((always_inline)) { fetch_part<kUnits>(ahead, pass, t); });
    column += kUnits * kUnitColumns;
  }
  for (; column < value_size; column += kUnitColumns) {
    add_stored_values<Source, kRows, 1>(rows, weights, corrections, values, column, begin, end,
                                        [](int64_t) {});
  }
}

template <typename Source>
void convert_tile(const char* const* rows, int64_t size, float* to, const char** converted) {
  for (int64_t t = 0; t < kTileTokens; ++t, to += size) {
    for (int64_t u = 0; u < size / kUnitColumns; ++u) {
      Vector first, second;
      Source::load(rows[t], u, &first, &second);
      store_vector(first, to + u * kUnitColumns);
      store_vector(second, to + u * kUnitColumns + kWidth);
    }
    converted[t] = reinterpret_cast<const char*>(to);
  }
}

template <int kCount>
struct Count {
  static constexpr int value = kCount;
};

struct StoredWeights {
  alignas(64) float of[kAttendRows][kTileTokens];
  float corrections[kAttendRows];
};

// Rows that are computed together.
template <typename Source>
constexpr int kMostRows = kWidth == 8 && Source::kBytes == 4 ? 6 : 4;

// factor: of what `Source` loads. The first rows' pass prefetches.
template <typename Source, int kUnits, typename Rows>
void weigh_stored_rows(const AttendArgs& args, const char* const* keys, float factor,
                       const Rows& ahead, StoredWeights* w) {
  int64_t r = 0;
  const auto turn = [&](auto num, const auto& fetched) {
    constexpr int kRows = decltype(num)::value;
    const Row* rows = args.rows + r;
    if constexpr (kRows == 6) {
      dot_products_of_six<kUnits>(rows, keys, args.row_size, fetched, w->of + r);
    } else {
      stored_dot_products<Source, kRows, kUnits>(rows, keys, args.row_size, fetched, w->of + r);
    }
    for (const int64_t end = r + kRows; r < end; ++r) {
      w->corrections[r] = weigh(args.rows[r], args.scale * factor, args.soft_cap, w->of[r]);
      if (factor == 1.0f) continue;
      for (int64_t t = 0; t < kTileTokens; t += kWidth) {
        store_vector(load_vector(w->of[r] + t) * factor, w->of[r] + t);
      }
    }
  };
  if (kMostRows<Source> == 6 && args.num_rows >= 6) {
    turn(Count<kMostRows<Source>>{}, ahead);
    while (args.num_rows - r >= 6) turn(Count<kMostRows<Source>>{}, NothingAhead{});
    if (args.num_rows - r >= 4) turn(Count<4>{}, NothingAhead{});
    if (args.num_rows - r >= 2) turn(Count<2>{}, NothingAhead{});
  } else if (args.num_rows >= 4) {
    turn(Count<4>{}, ahead);
    while (args.num_rows - r >= 4) turn(Count<4>{}, NothingAhead{});
    if (args.num_rows - r >= 2) turn(Count<2>{}, NothingAhead{});
  } else if (args.num_rows >= 2) {
    turn(Count<2>{}, ahead);
  } else {
    turn(Count<1>{}, ahead);
  }
  if (r < args.num_rows) turn(Count<1>{}, NothingAhead{});
}

template <typename Source, typename Rows>
void add_stored_rows(const AttendArgs& args, const char* const* values, const Rows& ahead,
                     const StoredWeights& w) {
  int64_t r = 0;
  const auto turn = [&](auto num, const auto& fetched) {
    constexpr int kRows = decltype(num)::value;
    add_all_stored_values<Source, kRows>(args.rows + r, w.of + r, w.corrections + r, values,
                                         args.value_size, fetched);
    r += kRows;
  };
  while (r < args.num_rows) {
    int64_t num = 1;
    while (num < kMostRows<Source> && r + num < args.num_rows &&
           see_the_same(args.rows[r], args.rows[r + num])) {
      ++num;
    }
    if (num == 6) {
      constexpr int kSix = kMostRows<Source>;
      r == 0 ? turn(Count<kSix>{}, ahead) : turn(Count<kSix>{}, NothingAhead{});
    } else if (num >= 4) {
      r == 0 ? turn(Count<4>{}, ahead) : turn(Count<4>{}, NothingAhead{});
    } else if (num >= 2) {
      r == 0 ? turn(Count<2>{}, ahead) : turn(Count<2>{}, NothingAhead{});
    } else {
      r == 0 ? turn(Count<1>{}, ahead) : turn(Count<1>{}, NothingAhead{});
    }
  }
}

// With few rows, memory is the limit: the pass over the keys prefetches this tile's values, and
// that over the values the next tile's keys. With more, there is time to prefetch the whole next
// tile. kUnits: of keys and of values; 0 when known only at run time.
template <typename Source, int kUnits>
void attend_stored_as(const AttendArgs& args, float factor) {
  constexpr int64_t kManyRows = Source::kBytes == 1 ? 8 : 16;  // that pay for converting a tile
  using Rows = Ahead<kUnits, kUnits * kUnitColumns * Source::kBytes / 64>;
  const Tile &tile = *args.tile, &next = *args.prefetch;
  const int64_t value_bytes = args.value_size * Source::kBytes;
  const Rows next_keys{next.key, args.prefetch_bytes}, next_values{next.value, value_bytes};
  StoredWeights w;
  if (args.num_rows < kManyRows) {
    const Rows values{tile.value, value_bytes};
    if (Source::may_have_nan(tile.key, args.row_size)) {
      weigh_stored_rows<typename Source::Slow, 0>(args, tile.key, factor, values, &w);
    } else {
      weigh_stored_rows<Source, kUnits>(args, tile.key, factor, values, &w);
    }
    if (Source::may_have_nan(tile.value, args.value_size)) {
      add_stored_rows<typename Source::Slow>(args, tile.value, next_keys, w);
    } else {
      add_stored_rows<Source>(args, tile.value, next_keys, w);
    }
    return;
  }
  alignas(64) float floats[kTileTokens * kMaxRowSize];
  const char* rows[kTileTokens];
  convert_tile<typename Source::Slow>(tile.key, args.row_size, floats, rows);
  weigh_stored_rows<StoredFloats, kUnits>(args, rows, factor, next_keys, &w);
  convert_tile<typename Source::Slow>(tile.value, args.value_size, floats, rows);
  add_stored_rows<StoredFloats>(args, rows, next_values, w);
}

template <typename Source>
void attend_stored_of(const AttendArgs& args, float factor) {
  const int64_t size = args.row_size == args.value_size ? args.row_size : 0;
  if (size == 128) return attend_stored_as<Source, 128 / kUnitColumns>(args, factor);
  attend_stored_as<Source, 0>(args, factor);
}

void attend_stored(const AttendArgs& args) {
  switch (args.dtype) {
    case Dtype::kFloat16:
      return attend_stored_of<StoredFp16>(args, 1.0f);
    case Dtype::kBFloat16:
      return attend_stored_of<StoredBf16>(args, 1.0f);
    case Dtype::kFloat8E4M3:
      return attend_stored_of<StoredE4m3<false>>(args, 256.0f);
    default:
      return attend_stored_of<StoredE5m2>(args, 1.0f);
  }
}

// Puts a row's columns into the order of stored units, or back.
void reorder(float* row, int64_t count, Dtype dtype, bool back) {
  if (dtype == Dtype::kFloat16) return;
  float unit[kUnitColumns];
  for (float* at = row; at < row + count; at += kUnitColumns) {
    std::memcpy(unit, at, sizeof unit);
    for (int i = 0; i < kWidth; ++i) {
      for (int half = 0; half < 2; ++half) {
        const int stored = half * kWidth + i, column = 2 * i + half;
        at[back ? column : stored] = unit[back ? stored : column];
      }
    }
  }
}

}  // namespace
}  // namespace kvplane
