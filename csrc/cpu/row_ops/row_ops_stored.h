// Attention over keys and values of 16 and 8 bits as they are stored, in fp32 with fused products
// and sums. For files of an instruction set, after row_ops_vector.h.
//
//   unit     2 * kWidth columns: two registers of fp32, from one load of stored numbers. In
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
#include "weights_of_rows.h"

// For functions that are large and have many variants.
#define KVPLANE_NOINLINE __attribute__((noinline))

namespace kvplane {
namespace {

template <int kCount>
struct Count {
  static constexpr int value = kCount;
};

// Rows to prefetch during a pass over a tile, some lines at each step: all at once would fill the
// memory queue and stall. kUnits, kLines: of a row; 0 when known only at run time.
template <int kUnits, int kLines>
struct Ahead {
  static constexpr int kUnitsOfRow = kUnits;
  static constexpr int kLinesOfRow = kLines;
  const char* const* rows;   // [kTileTokens]
  const char* const* again;  // [kTileTokens], or null
  int64_t row_bytes;

  KVPLANE_INLINE void fetch(int64_t row, int64_t line) const {
    prefetch_line(rows[row] + 64 * line);
    if (again != nullptr) prefetch_line(again[row] + 64 * line);
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
    if (step >= kSteps) return;  // of units whose number is known only at run time
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

// sums[r * kTokens + i] = the products of row r with token t + i, still one sum a lane. kUnits: of
// a row, 0 when known only at run time.
template <typename Source, int kRows, int kTokens, int kUnits, typename Rows>
KVPLANE_INLINE void sum_products(const Row* rows, const char* const* keys, int64_t t,
                                 int64_t num_units, const Rows& ahead, Vector* sums) {
  if constexpr (kRows == 1 && kUnits > 0 && kUnits % 2 == 0 && Source::kBytes == 1) {
    KVPLANE_UNROLL for (int64_t u = 0; u < kUnits; u += 2) {
      fetch_step<kTokens, kUnits / 2>(ahead, t, static_cast<int>(u / 2));
      Vector q[4];
      KVPLANE_UNROLL for (int i = 0; i < 4; ++i) {
        const float* from = static_cast<const float*>(rows[0].query);
        q[i] = hold(load_vector(from + u * kUnitColumns + i * kWidth));
      }
      KVPLANE_UNROLL for (int i = 0; i < kTokens; ++i) {
        Vector k[4];
        Source::load_two(keys[t + i], u, k);
        KVPLANE_UNROLL for (int j = 0; j < 4; ++j) add_product(k[j], q[j], &sums[i]);
      }
    }
    return;
  }
  KVPLANE_UNROLL for (int64_t u = 0; u < num_units; ++u) {
    fetch_step<kTokens, (kUnits > 0 ? kUnits : 1)>(ahead, t, static_cast<int>(u));
    const auto query = [&](int r, int half) __attribute__((always_inline)) {
      const float* from = static_cast<const float*>(rows[r].query);
      return hold(load_vector(from + u * kUnitColumns + half * kWidth));
    };
    if constexpr (kRows <= 2) {
      Vector q[kRows][2];
      KVPLANE_UNROLL for (int r = 0; r < kRows; ++r) {
        KVPLANE_UNROLL for (int half = 0; half < 2; ++half) q[r][half] = query(r, half);
      }
      KVPLANE_UNROLL for (int i = 0; i < kTokens; ++i) {
        Vector first, second;
        Source::load(keys[t + i], u, &first, &second);
        KVPLANE_UNROLL for (int r = 0; r < kRows; ++r) {
          add_product(first, q[r][0], &sums[r * kTokens + i]);
          add_product(second, q[r][1], &sums[r * kTokens + i]);
        }
      }
    } else {
      KVPLANE_UNROLL for (int half = 0; half < 2; ++half) {
        Vector k[kTokens];
        KVPLANE_UNROLL for (int i = 0; i < kTokens; ++i) {
          k[i] = Source::load_half(keys[t + i], u, half);
        }
        KVPLANE_UNROLL for (int r = 0; r < kRows; ++r) {
          const Vector q = query(r, half);
          KVPLANE_UNROLL for (int i = 0; i < kTokens; ++i) {
            add_product(k[i], q, &sums[r * kTokens + i]);
          }
        }
      }
    }
  }
}

// With 16 registers four or six rows have 12 sums, so that the units never wait for one: more than
// a register has lanes. They wait in memory until a row has those of kWidth tokens.
template <typename Source, int kRows, int kUnits, typename Rows>
KVPLANE_NOINLINE void stored_dot_products(const Row* rows, const char* const* keys,
                                          int64_t row_size, const Rows& ahead,
                                          float (*dots)[kTileTokens]) {
  constexpr bool kTwelve = kWidth == 8 && kRows >= 4;
  constexpr int kTokens = (kTwelve ? 12 : kWidth) / kRows, kRing = 2 * kWidth;
  const int64_t num_units = kUnits > 0 ? kUnits : row_size / kUnitColumns;
  Vector waiting[kTwelve ? kRows : 1][kRing];
  int64_t done = 0;
  const auto step = [&](int64_t t, auto num) __attribute__((always_inline)) {
    constexpr int kNum = decltype(num)::value;
    Vector sums[kRows * kNum] = {};
    sum_products<Source, kRows, kNum, kUnits>(rows, keys, t, num_units, ahead, sums);
    if constexpr (kTwelve) {
      KVPLANE_UNROLL for (int i = 0; i < kNum; ++i) {
        KVPLANE_UNROLL for (int r = 0; r < kRows; ++r) {
          waiting[r][(t + i) % kRing] = sums[r * kNum + i];
        }
      }
      if (t + kNum - done < kWidth) return;
      for (int r = 0; r < kRows; ++r) {
        store_vector(totals_in_order(waiting[r] + done % kRing), dots[r] + done);
      }
      done += kWidth;
    } else {
      float all[kWidth];
      store_vector(totals_in_order(sums), all);
      KVPLANE_UNROLL for (int r = 0; r < kRows; ++r) {
        std::memcpy(dots[r] + t, all + r * kNum, sizeof(float) * kNum);
      }
    }
  };
  int64_t t = 0;
  for (; t + kTokens <= kTileTokens; t += kTokens) step(t, Count<kTokens>{});
  constexpr int kRest = kTileTokens % kTokens;
  if constexpr (kRest > 0) step(t, Count<kRest>{});
}

// Calls add(t) for tokens [begin, end) in a pass over kHalves halves of units of all values.
// Between them fetches some rows, so that the passes over a whole tile together fetch each row in
// order.
template <int kHalves, typename Rows, typename Add>
KVPLANE_INLINE void add_and_fetch(const Rows& ahead, int64_t pass, int64_t begin, int64_t end,
                                  const Add& add) {
  constexpr int kLines = Rows::kLinesOfRow;
  if constexpr (kLines > 0) {
    if (begin == 0 && end == kTileTokens) {
      constexpr int kPasses = 2 * Rows::kUnitsOfRow / kHalves;  // the further ones fetch nothing
      constexpr int kParts = kPasses >= kLines ? kLines : kPasses >= 2 ? 2 : 1;  // of a row
      if (pass < kParts) {
        int64_t row = pass * kTileTokens / kParts;
        for (int64_t t = 0; t < kTileTokens; t += kParts, ++row) {
          _Pragma("GCC unroll 1") for (int part = 0; part < kParts; ++part) {
            KVPLANE_UNROLL for (int i = 0; i < kLines / kParts; ++i) {
              ahead.fetch(row, part * (kLines / kParts) + i);
            }
            add(t + part);
          }
        }
        return;
      }
    }
  }
  for (int64_t t = begin; t < end; ++t) {
    if constexpr (kLines >= 0) {
      if (pass == 0) ahead.fetch_row(t);
    }
    add(t);
  }
}

// Adds the weighted values of tokens [begin, end), which all kRows rows see, to kHalves halves of
// units, from half kFirst of `unit` on.
template <typename Source, int kRows, int kHalves, int kFirst, typename Rows>
KVPLANE_INLINE void add_stored_values(const Row* rows, const float (*weights)[kTileTokens],
                                      const float* corrections, const char* const* values,
                                      int64_t unit, const Rows& ahead, int64_t pass) {
  const int64_t column = unit * kUnitColumns + kFirst * kWidth;
  Vector sums[kRows][kHalves];
  KVPLANE_UNROLL for (int r = 0; r < kRows; ++r) {
    KVPLANE_UNROLL for (int i = 0; i < kHalves; ++i) {
      sums[r][i] = load_vector(rows[r].out + column + i * kWidth) * corrections[r];
    }
  }
  const auto add = [&](int64_t t) __attribute__((always_inline)) {
    Vector x[kHalves];
    KVPLANE_UNROLL for (int i = 0; i < kHalves; ++i) {
      const int half = kFirst + i;
      if constexpr (Source::kBytes == 1 && kFirst == 0 && kHalves % 4 == 0) {
        if (i % 4 == 0) Source::load_two(values[t], unit + half / 2, &x[i]);
      } else if (half % 2 == 0 && i + 1 < kHalves) {
        Source::load(values[t], unit + half / 2, &x[i], &x[i + 1]);
      } else if (half % 2 == 0 || i == 0) {
        x[i] = Source::load_half(values[t], unit + half / 2, half % 2);
      }
    }
    KVPLANE_UNROLL for (int r = 0; r < kRows; ++r) {
      const Vector weight = all_lanes(weights[r][t]);
      KVPLANE_UNROLL for (int i = 0; i < kHalves; ++i) { add_product(x[i], weight, &sums[r][i]); }
    }
  };
  add_and_fetch<kHalves>(ahead, pass, rows[0].begin, rows[0].end, add);
  KVPLANE_UNROLL for (int r = 0; r < kRows; ++r) {
    KVPLANE_UNROLL for (int i = 0; i < kHalves; ++i) {
      store_vector(sums[r][i], rows[r].out + column + i * kWidth);
    }
  }
}

template <typename Source, int kRows, typename Rows>
KVPLANE_NOINLINE void add_all_stored_values(const Row* rows, const float (*weights)[kTileTokens],
                                            const float* corrections, const char* const* values,
                                            int64_t value_size, const Rows& ahead) {
  // As many sums as possible that leave registers for everything else.
  constexpr int kHalves = kWidth == 16 ? (kRows == 4 ? 4 : 8)
                          : kRows == 6 ? 2
                          : kRows == 4 ? 3
                                       : 8 / kRows;
  const int64_t num_halves = value_size / kWidth;
  int64_t half = 0, pass = 0;
  const auto turn = [&](auto num, auto first, const auto& fetched) __attribute__((always_inline)) {
    add_stored_values<Source, kRows, decltype(num)::value, decltype(first)::value>(
        rows, weights, corrections, values, half / 2, fetched, pass);
    half += decltype(num)::value;
    ++pass;
  };
  while (half + kHalves <= num_halves) {
    turn(Count<kHalves>{}, Count<0>{}, ahead);
    if (kHalves % 2 == 1 && half + kHalves <= num_halves) {
      turn(Count<kHalves>{}, Count<kHalves % 2>{}, ahead);
    }
  }
  if (half % 2 == 1) turn(Count<1>{}, Count<1>{}, NothingAhead{});
  while (half < num_halves) turn(Count<2>{}, Count<0>{}, NothingAhead{});
}

// Returns whether Source::Slow has to convert them instead.
template <typename Source>
bool convert_rows(const char* const* rows, int64_t size, float* to, const char** converted) {
  const int64_t num_units = size / kUnitColumns;
  constexpr int64_t kUnitBytes = kUnitColumns * Source::kBytes;
  typename Source::Codes codes;
  for (int64_t t = 0; t < kTileTokens; ++t, to += size) {
    int64_t u = 0;
    for (; u + 2 <= num_units; u += 2) {
      Vector four[4];
      Source::load_two(rows[t], u, four);
      KVPLANE_UNROLL for (int i = 0; i < 4; ++i) {
        store_vector(four[i], to + u * kUnitColumns + i * kWidth);
      }
      codes.add(load_as<ByteVector>(rows[t] + u * kUnitBytes));
    }
    if (u < num_units) {
      Vector first, second;
      Source::load(rows[t], u, &first, &second);
      store_vector(first, to + u * kUnitColumns);
      store_vector(second, to + u * kUnitColumns + kWidth);
      ByteVector last = {};
      std::memcpy(&last, rows[t] + u * kUnitBytes, sizeof(Shorts));
      codes.add(last);
    }
    converted[t] = reinterpret_cast<const char*>(to);
  }
  return codes.found();
}

struct StoredWeights {
  alignas(64) float of[kAttendRows][kTileTokens];
  float corrections[kAttendRows];
};

template <typename Source>
void convert_tile(const char* const* rows, int64_t size, float* to, const char** converted) {
  if (convert_rows<Source>(rows, size, to, converted)) {
    convert_rows<typename Source::Slow>(rows, size, to, converted);
  }
}

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
    stored_dot_products<Source, kRows, kUnits>(rows, keys, args.row_size, fetched, w->of + r);
    const auto weigh = [&](auto part) __attribute__((always_inline)) {
      weigh_rows<decltype(part)::value>(args.rows + r, args.scale, args.soft_cap, factor, w->of + r,
                                        w->corrections + r);
      r += decltype(part)::value;
    };
    weigh(Count<kRows == 6 ? 4 : kRows>{});
    if constexpr (kRows == 6) weigh(Count<2>{});
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

// kUnits: of keys and of values; 0 when known only at run time.
template <typename Source, int kUnits>
void attend_stored_as(const AttendArgs& args, float factor) {
  constexpr int64_t kManyRows = Source::kBytes == 1 ? 8 : 16;  // that pay for converting a tile
  using Rows = Ahead<kUnits, kUnits * kUnitColumns * Source::kBytes / 64>;
  const Tile &tile = *args.tile, &next = *args.prefetch;
  const int64_t value_bytes = args.value_size * Source::kBytes;
  StoredWeights w;
  if (args.num_rows < kManyRows) {
    const Rows next_keys{next.key, again_with_keys(args), args.prefetch_bytes};
    const Rows next_values{next.value, again_with_values(args), value_bytes};
    if (Source::may_have_nan(tile.key, args.row_size)) {
      weigh_stored_rows<typename Source::Slow, 0>(args, tile.key, factor, next_keys, &w);
    } else {
      weigh_stored_rows<Source, kUnits>(args, tile.key, factor, next_keys, &w);
    }
    if (Source::may_have_nan(tile.value, args.value_size)) {
      add_stored_rows<typename Source::Slow>(args, tile.value, next_values, w);
    } else {
      add_stored_rows<Source>(args, tile.value, next_values, w);
    }
    return;
  }
  const Rows next_keys{next.key, nullptr, args.prefetch_bytes};
  const Rows next_values{next.value, nullptr, value_bytes};
  alignas(64) float floats[kTileTokens * kMaxRowSize];
  const char* rows[kTileTokens];
  convert_tile<Source>(tile.key, args.row_size, floats, rows);
  weigh_stored_rows<StoredFloats, kUnits>(args, rows, factor, next_keys, &w);
  convert_tile<Source>(tile.value, args.value_size, floats, rows);
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
