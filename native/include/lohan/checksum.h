// CRC-32C: the Castagnoli polynomial 0x1EDC6F41, reflected, with initial value and final xor 0xFFFFFFFF, as
// iSCSI (RFC 3720, appendix B.4), ext4 and NVMe use it. "123456789" has the value 0xE3069283, nothing has 0.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "lohan/thread_pool.h"

namespace lohan {

/// Which build of the inner loop runs; all give the same value.
enum class ChecksumKernel {
  kAuto,      ///< the fastest one available
  kPortable,  ///< eight tables, 8 bytes at a time
  kSse42,     ///< the processor's crc32 instruction on three streams (needs PCLMULQDQ too)
  kAvx512,    ///< carry-less multiplication of 64 bytes at a time (needs VPCLMULQDQ and kSse42)
};

/// The kernels this processor can run, slowest first.
std::vector<ChecksumKernel> AvailableChecksumKernels();

/// CRC-32C of `size_bytes` bytes on the calling thread. Pass the value of what came before as `before` to go
/// on with it. Any alignment. Throws std::invalid_argument for a negative size and for a kernel that the
/// processor lacks.
uint32_t Crc32c(const std::byte* data, int64_t size_bytes, uint32_t before = 0,
                ChecksumKernel kernel = ChecksumKernel::kAuto);

/// The value of A followed by B, from the values of both and the size of B. Takes about 1 us.
uint32_t CombineCrc32c(uint32_t first, uint32_t second, int64_t second_bytes);

/// CRC-32C of the bytes on all threads of the pool: the standard value, whatever their number. Throws as
/// Crc32c and ThreadPool::Run do.
uint32_t ParallelCrc32c(const std::byte* data, int64_t size_bytes, ThreadPool& pool,
                        ChecksumKernel kernel = ChecksumKernel::kAuto);

/// Copies the bytes and returns the CRC-32C of what `target` now holds, in one pass over memory: each tile of
/// 256 KiB is summed while it still lies in the second-level cache. Throws std::invalid_argument when the two
/// overlap, else as ParallelCrc32c does.
uint32_t CopyWithChecksum(std::byte* target, const std::byte* source, int64_t size_bytes, ThreadPool& pool,
                          ChecksumKernel kernel = ChecksumKernel::kAuto);

}  // namespace lohan
