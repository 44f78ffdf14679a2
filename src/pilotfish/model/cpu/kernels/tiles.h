// Products of bfloat16 on AMX, whose tiles hold 16 rows of 64 bytes. One instruction multiplies a tile of inputs
// [rows, 16 steps] by one of weights [16 steps, 16 outputs] and adds to a tile of sums [rows, 16 outputs], each sum in a
// fixed order of its own. Packed weights have this layout already; inputs lie row by row, padded to whole tiles.

#pragma once

#include "vectors.h"

#ifdef PILOTFISH_EMULATED_TILES  // by a test, with the same names
#include PILOTFISH_EMULATED_TILES
#define PILOTFISH_TILES
#elif defined(__AMX_BF16__)
#define PILOTFISH_TILES
#define tile_configure _tile_loadconfig
#define tile_release _tile_release
#define tile_zero _tile_zero
#define tile_load _tile_loadd
#define tile_store _tile_stored
#define tile_multiply _tile_dpbf16ps
#endif

namespace pilotfish {

#ifdef PILOTFISH_TILES

constexpr int64_t kTileRows = 16, kTileSteps = 16, kTileBytes = 64;

// What a tile configuration holds: palette 1, and each tile's rows and bytes of a row.
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  void set(int tile, int64_t count) {
    rows[tile] = static_cast<uint8_t>(count);
    row_bytes[tile] = count > 0 ? kTileBytes : 0;
  }
};

// 16 steps of a panel's weights, widened where they are int8.
struct StepWeights {
  alignas(64) BFloat16 widened[kTileSteps * kTileBytes];

  const BFloat16* of(const BFloat16* w) { return w; }
  const BFloat16* of(const int8_t* w) {
    for (int64_t i = 0; i < kTileSteps * kTileBytes; i += kLanes) store_rounded(widened + i, floats_of(w + i));
    return widened;
  }
};

// Sums of one panel of weights, [steps, 32, 2] of bfloat16 or int8, into acc [rows, 32]. x [rows, steps] holds two
// bfloat16 a step; steps are a multiple of kTileSteps. Tiles 0 to 3 are sums, of two blocks of rows by two halves of the
// panel; 4 and 5 inputs; 6 and 7 weights.
template <typename W>
void multiply_tiles(int64_t rows, int64_t steps, const uint32_t* x, const W* w, float* acc) {
  constexpr int64_t kPanelBytes = 2 * kTileBytes;  // of a step's weights, and of a row's sums
  const int64_t stride = steps * sizeof(uint32_t);
  StepWeights weights;
  for (; rows > 0; rows -= 2 * kTileRows, x += 2 * kTileRows * steps, acc += 2 * kTileRows * 32) {
    const int64_t top = std::min(rows, kTileRows), bottom = std::clamp<int64_t>(rows - kTileRows, 0, kTileRows);
    TileConfig config;
    for (int tile : {0, 1, 4}) config.set(tile, top);
    for (int tile : {2, 3, 5}) config.set(tile, bottom);
    for (int tile : {6, 7}) config.set(tile, kTileSteps);
    tile_configure(&config);
    tile_zero(0);
    tile_zero(1);
    if (bottom > 0) {
      tile_zero(2);
      tile_zero(3);
    }
    for (int64_t k = 0; k < steps; k += kTileSteps) {
      const W* step = w + k * kTileBytes;
      for (size_t line = 0; line < kTileSteps * kTileBytes * sizeof(W); line += 64)
        __builtin_prefetch(reinterpret_cast<const char*>(step) + 8192 + line);
      const BFloat16* panel = weights.of(step);
      tile_load(6, panel, kPanelBytes);
      tile_load(7, panel + kTileBytes / 2, kPanelBytes);
      tile_load(4, x + k, stride);
      tile_multiply(0, 4, 6);
      tile_multiply(1, 4, 7);
      if (bottom > 0) {
        tile_load(5, x + kTileRows * steps + k, stride);
        tile_multiply(2, 5, 6);
        tile_multiply(3, 5, 7);
      }
    }
    tile_store(0, acc, kPanelBytes);
    tile_store(1, acc + 16, kPanelBytes);
    if (bottom > 0) {
      tile_store(2, acc + kTileRows * 32, kPanelBytes);
      tile_store(3, acc + kTileRows * 32 + 16, kPanelBytes);
    }
  }
  tile_release();
}

#else

template <typename W>
void multiply_tiles(int64_t, int64_t, const void*, const W*, float*);  // never called

#endif

}  // namespace pilotfish
