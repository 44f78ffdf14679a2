// AMX's tiles in plain C++, for processors without them: what Intel's manual says of TDPBF16PS, tile by tile.

#pragma once

#include <cstdint>
#include <cstring>

namespace emulated {

struct Config {
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};

inline thread_local Config config;
inline thread_local float tiles[8][16][16];

inline float widen(uint16_t half) {
  const uint32_t bits = uint32_t{half} << 16;
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

inline void multiply(int c, int a, int b) {
  for (int m = 0; m < config.rows[c]; ++m)
    for (int k = 0; k < config.row_bytes[a] / 4; ++k)
      for (int n = 0; n < config.row_bytes[c] / 4; ++n) {
        uint16_t left[2], right[2];
        std::memcpy(left, &tiles[a][m][k], 4);
        std::memcpy(right, &tiles[b][k][n], 4);
        for (int i = 0; i < 2; ++i) tiles[c][m][n] += widen(left[i]) * widen(right[i]);
      }
}

inline void load(int t, const void* from, int64_t stride) {
  for (int row = 0; row < config.rows[t]; ++row)
    std::memcpy(tiles[t][row], static_cast<const char*>(from) + row * stride, config.row_bytes[t]);
}

inline void store(int t, void* to, int64_t stride) {
  for (int row = 0; row < config.rows[t]; ++row)
    std::memcpy(static_cast<char*>(to) + row * stride, tiles[t][row], config.row_bytes[t]);
}

}  // namespace emulated

#define tile_configure(from) std::memcpy(&emulated::config, from, sizeof(emulated::config))
#define tile_release() ((void)0)
#define tile_zero(t) std::memset(emulated::tiles[t], 0, sizeof(emulated::tiles[t]))
#define tile_load(t, from, stride) emulated::load(t, from, stride)
#define tile_store(t, to, stride) emulated::store(t, to, stride)
#define tile_multiply(c, a, b) emulated::multiply(c, a, b)
