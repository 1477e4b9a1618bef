#include "lohan/checksum.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "checksum_kernels.h"

namespace lohan {
namespace {

// A tile and its copy fit the second-level cache (512 KiB and more on the processors of the last decade's
// servers), and a task of 10 to 30 us keeps the pool's shared counter cold.
constexpr int64_t kTileBytes = 256 << 10;
constexpr uint32_t kTileShift = PowerOfX(8 * kTileBytes);

using ExtendFunction = uint32_t (*)(uint32_t state, const std::byte* data, size_t size);

const char* NameOf(ChecksumKernel kernel) {
  switch (kernel) {
    case ChecksumKernel::kAuto:
      return "AUTO";
    case ChecksumKernel::kPortable:
      return "PORTABLE";
    case ChecksumKernel::kSse42:
      return "SSE42";
    case ChecksumKernel::kAvx512:
      return "AVX512";
  }
  return "unknown";
}

ExtendFunction FunctionOf(ChecksumKernel kernel) {
  const std::vector<ChecksumKernel> available = AvailableChecksumKernels();
  if (kernel == ChecksumKernel::kAuto) kernel = available.back();
  if (std::find(available.begin(), available.end(), kernel) == available.end()) {
    throw std::invalid_argument(std::string("this processor does not have the checksum kernel ") +
                                NameOf(kernel));
  }
#ifdef LOHAN_X86_KERNELS
  if (kernel == ChecksumKernel::kAvx512) return &ExtendAvx512;
  if (kernel == ChecksumKernel::kSse42) return &ExtendSse42;
#endif
  return &ExtendPortable;
}

void CheckSize(int64_t size_bytes) {
  if (size_bytes >= 0) return;
  throw std::invalid_argument("size_bytes is " + std::to_string(size_bytes) + "; it must be 0 or more");
}

/// Calls `tile_value(begin, length)` for every tile on the pool's threads and combines the values in order.
template <typename TileValue>
uint32_t OverTiles(int64_t size_bytes, ThreadPool& pool, const TileValue& tile_value) {
  const int64_t tiles = (size_bytes + kTileBytes - 1) / kTileBytes;
  std::vector<uint32_t> values(static_cast<size_t>(tiles));
  pool.Run(tiles, [&](int64_t index) {
    const int64_t begin = index * kTileBytes;
    values[static_cast<size_t>(index)] = tile_value(begin, std::min(kTileBytes, size_bytes - begin));
  });
  if (tiles == 0) return 0;
  uint32_t whole_tiles = 0;
  for (int64_t index = 0; index + 1 < tiles; ++index) {
    whole_tiles = MultiplyModP(whole_tiles, kTileShift) ^ values[static_cast<size_t>(index)];
  }
  return CombineCrc32c(whole_tiles, values.back(), size_bytes - (tiles - 1) * kTileBytes);
}

}  // namespace

std::vector<ChecksumKernel> AvailableChecksumKernels() {
  std::vector<ChecksumKernel> available = {ChecksumKernel::kPortable};
#ifdef LOHAN_X86_KERNELS
  if (__builtin_cpu_supports("sse4.2") && __builtin_cpu_supports("pclmul")) {
    available.push_back(ChecksumKernel::kSse42);
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("vpclmulqdq")) {
      available.push_back(ChecksumKernel::kAvx512);
    }
  }
#endif
  return available;
}

uint32_t Crc32c(const std::byte* data, int64_t size_bytes, uint32_t before, ChecksumKernel kernel) {
  CheckSize(size_bytes);
  return ~FunctionOf(kernel)(~before, data, static_cast<size_t>(size_bytes));
}

uint32_t CombineCrc32c(uint32_t first, uint32_t second, int64_t second_bytes) {
  CheckSize(second_bytes);
  // Initial value and final xor of both parts cancel; what stays is the first remainder, shifted.
  return MultiplyModP(first, PowerModP(PowerOfX(8), static_cast<uint64_t>(second_bytes))) ^ second;
}

uint32_t ParallelCrc32c(const std::byte* data, int64_t size_bytes, ThreadPool& pool, ChecksumKernel kernel) {
  CheckSize(size_bytes);
  const ExtendFunction extend = FunctionOf(kernel);
  return OverTiles(size_bytes, pool, [&](int64_t begin, int64_t length) {
    return ~extend(~uint32_t{0}, data + begin, static_cast<size_t>(length));
  });
}

uint32_t CopyWithChecksum(std::byte* target, const std::byte* source, int64_t size_bytes, ThreadPool& pool,
                          ChecksumKernel kernel) {
  CheckSize(size_bytes);
  const auto target_begin = reinterpret_cast<uintptr_t>(target);
  const auto source_begin = reinterpret_cast<uintptr_t>(source);
  const auto size = static_cast<uintptr_t>(size_bytes);
  if (target_begin < source_begin + size && source_begin < target_begin + size) {
    throw std::invalid_argument("target and source overlap in memory");
  }
  const ExtendFunction extend = FunctionOf(kernel);
  return OverTiles(size_bytes, pool, [&](int64_t begin, int64_t length) {
    std::memcpy(target + begin, source + begin, static_cast<size_t>(length));
    return ~extend(~uint32_t{0}, target + begin, static_cast<size_t>(length));
  });
}

}  // namespace lohan
