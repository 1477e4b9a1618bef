#include "lohan/checksum.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <random>
#include <string>

#include "check.h"
#include "lohan/aligned_buffer.h"

namespace lohan {
namespace {

constexpr int64_t kTileBytes = 256 << 10;
// Borders of the AVX-512 kernel's blocks (it begins at two), and of the SSE4.2 kernel's: three streams of 512
// and of 8,192 bytes.
constexpr int64_t kFoldedBlockBytes = 256;
constexpr int64_t kShortBlockBytes = 3 * 512;
constexpr int64_t kLongBlockBytes = 3 * 8192;

/// The definition, bit by bit.
uint32_t Reference(const std::byte* data, int64_t size_bytes) {
  uint32_t state = 0xFFFFFFFF;
  for (int64_t i = 0; i < size_bytes; ++i) {
    state ^= static_cast<uint32_t>(data[i]);
    for (int bit = 0; bit < 8; ++bit) state = (state & 1) != 0 ? (state >> 1) ^ 0x82F63B78 : state >> 1;
  }
  return ~state;
}

std::vector<std::byte> RandomBytes(int64_t count) {
  std::mt19937 generator(20);
  std::vector<std::byte> bytes(static_cast<size_t>(count));
  std::generate(bytes.begin(), bytes.end(), [&] { return static_cast<std::byte>(generator()); });
  return bytes;
}

/// Lengths on both sides of every border a kernel has.
std::vector<int64_t> BorderLengths() {
  std::vector<int64_t> lengths(200);
  std::iota(lengths.begin(), lengths.end(), 0);
  for (const int64_t border :
       {kFoldedBlockBytes, 2 * kFoldedBlockBytes, 3 * kFoldedBlockBytes, kShortBlockBytes,
        2 * kShortBlockBytes, kLongBlockBytes, 2 * kLongBlockBytes, kLongBlockBytes + kShortBlockBytes}) {
    for (int64_t length = border - 9; length <= border + 9; ++length) lengths.push_back(length);
  }
  return lengths;
}

const std::byte* BytesOf(const std::string& text) { return reinterpret_cast<const std::byte*>(text.data()); }

TEST(PublishedValues) {
  std::string rising(32, '\0');
  std::iota(rising.begin(), rising.end(), '\0');
  const std::string falling(rising.rbegin(), rising.rend());
  const std::string scsi_read_command(
      "\x01\xC0\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x14\x00\x00\x00\x00\x00\x04\x00"
      "\x00\x00\x00\x14\x00\x00\x00\x18\x28\x00\x00\x00\x00\x00\x00\x00\x02\x00\x00\x00\x00\x00\x00\x00",
      48);
  const std::vector<std::pair<std::string, uint32_t>> published = {
      {"", 0},
      {"123456789", 0xE3069283},
      // RFC 3720, appendix B.4, which prints the bytes in the order they are sent.
      {std::string(32, '\0'), 0x8A9136AA},
      {std::string(32, '\xFF'), 0x62A8AB43},
      {rising, 0x46DD794E},
      {falling, 0x113FDB5C},
      {scsi_read_command, 0xD9963A56},
  };
  for (const ChecksumKernel kernel : AvailableChecksumKernels()) {
    for (const auto& [text, value] : published) {
      CHECK_EQUAL(Crc32c(BytesOf(text), static_cast<int64_t>(text.size()), 0, kernel), value);
    }
  }
}

TEST(EveryKernelEqualsTheDefinitionAtEveryLength) {
  const std::vector<std::byte> bytes = RandomBytes(2 * kLongBlockBytes + 16);
  for (const int64_t length : BorderLengths()) {
    const uint32_t expected = Reference(bytes.data(), length);
    for (const ChecksumKernel kernel : AvailableChecksumKernels()) {
      CHECK_EQUAL(Crc32c(bytes.data(), length, 0, kernel), expected);
    }
  }
}

TEST(EveryKernelEqualsTheDefinitionAtEveryAlignment) {
  // Each array ends where its bytes end, so that ASan sees a read beyond.
  const std::vector<std::byte> bytes = RandomBytes(64 + kLongBlockBytes + kShortBlockBytes + 13);
  for (size_t skip = 0; skip < 64; ++skip) {
    for (const size_t length : {size_t{3}, size_t{64}, bytes.size() - 64}) {
      const std::vector<std::byte> tail(bytes.begin(), bytes.begin() + static_cast<ptrdiff_t>(skip + length));
      const uint32_t expected = Reference(tail.data() + skip, static_cast<int64_t>(length));
      for (const ChecksumKernel kernel : AvailableChecksumKernels()) {
        CHECK_EQUAL(Crc32c(tail.data() + skip, static_cast<int64_t>(length), 0, kernel), expected);
      }
    }
  }
}

TEST(AValueGoesOnAndCombines) {
  const std::vector<std::byte> bytes = RandomBytes(3000);
  const uint32_t whole = Reference(bytes.data(), 3000);
  for (int64_t split = 0; split <= 3000; split += split < 70 ? 1 : 97) {
    const uint32_t first = Crc32c(bytes.data(), split);
    for (const ChecksumKernel kernel : AvailableChecksumKernels()) {
      CHECK_EQUAL(Crc32c(bytes.data() + split, 3000 - split, first, kernel), whole);
    }
    CHECK_EQUAL(CombineCrc32c(first, Crc32c(bytes.data() + split, 3000 - split), 3000 - split), whole);
  }
  // Beyond 4 GiB: shifting twice by half the distance is shifting once.
  const int64_t half = (int64_t{3} << 33) + 5;
  const uint32_t zeros = CombineCrc32c(0x12345678, 0, half);
  CHECK_EQUAL(CombineCrc32c(zeros, 0, half), CombineCrc32c(0x12345678, 0, 2 * half));
  CHECK_EQUAL(CombineCrc32c(0x12345678, 0x9ABCDEF0, 0), 0x12345678u ^ 0x9ABCDEF0u);
}

TEST(TheValueDoesNotDependOnTheNumberOfThreads) {
  const std::vector<std::byte> bytes = RandomBytes(5 * kTileBytes + 70);
  for (const int threads : {1, 2, 3, 7}) {
    ThreadPool pool(threads);
    for (const int64_t length : {int64_t{0}, int64_t{1}, kTileBytes - 1, kTileBytes, kTileBytes + 1,
                                 2 * kTileBytes, 5 * kTileBytes + 63}) {
      for (const int64_t skip : {0, 1, 7}) {
        const uint32_t expected = Crc32c(bytes.data() + skip, length, 0, ChecksumKernel::kPortable);
        for (const ChecksumKernel kernel : AvailableChecksumKernels()) {
          CHECK_EQUAL(ParallelCrc32c(bytes.data() + skip, length, pool, kernel), expected);
        }
      }
    }
  }
}

TEST(ACopyIsExactAndTouchesNothingElse) {
  const std::vector<std::byte> bytes = RandomBytes(3 * kTileBytes + 70);
  ThreadPool pool(2);
  for (const int64_t length : {int64_t{0}, int64_t{1}, int64_t{63}, kTileBytes - 1, kTileBytes,
                               kTileBytes + 1, 3 * kTileBytes + 5}) {
    for (const int64_t target_skip : {1, 8, 61}) {
      const int64_t source_skip = (target_skip * 5) % 64;
      for (const ChecksumKernel kernel : AvailableChecksumKernels()) {
        std::vector<std::byte> target(static_cast<size_t>(target_skip + length + 1), std::byte{0xA5});
        const std::byte* source = bytes.data() + source_skip;
        const uint32_t value = CopyWithChecksum(target.data() + target_skip, source, length, pool, kernel);
        CHECK_EQUAL(value, Crc32c(source, length, 0, ChecksumKernel::kPortable));
        CHECK(std::equal(source, source + length, target.data() + target_skip));
        CHECK(std::all_of(target.begin(), target.begin() + static_cast<ptrdiff_t>(target_skip),
                          [](std::byte value_before) { return value_before == std::byte{0xA5}; }));
        CHECK(target.back() == std::byte{0xA5});
      }
    }
  }
}

TEST(BadArgumentsAreRefused) {
  std::vector<std::byte> bytes = RandomBytes(100);
  ThreadPool pool(1);
  CHECK_THROWS(std::invalid_argument, "size_bytes is -1", Crc32c(bytes.data(), -1));
  CHECK_THROWS(std::invalid_argument, "size_bytes is -2", CombineCrc32c(1, 2, -2));
  CHECK_THROWS(std::invalid_argument, "size_bytes is -3", ParallelCrc32c(bytes.data(), -3, pool));
  CHECK_THROWS(std::invalid_argument, "size_bytes is -4",
               CopyWithChecksum(bytes.data(), bytes.data() + 50, -4, pool));
  const std::vector<std::byte> before = bytes;
  for (const int distance : {0, 1, 49}) {
    CHECK_THROWS(std::invalid_argument, "overlap",
                 CopyWithChecksum(bytes.data() + distance, bytes.data(), 50, pool));
    CHECK_THROWS(std::invalid_argument, "overlap",
                 CopyWithChecksum(bytes.data(), bytes.data() + distance, 50, pool));
  }
  CHECK(bytes == before);
  CopyWithChecksum(bytes.data() + 50, bytes.data(), 50, pool);  // neighbours that touch do not overlap
  CHECK(std::equal(before.begin(), before.begin() + 50, bytes.begin() + 50));
}

TEST(AKernelTheProcessorLacksIsRefused) {
  const std::vector<ChecksumKernel> available = AvailableChecksumKernels();
  const auto lacks = [&](ChecksumKernel kernel) {
    return std::find(available.begin(), available.end(), kernel) == available.end();
  };
  if (available.size() == 3) test::Skip("this processor has every kernel there is a build for");
  if (lacks(ChecksumKernel::kAvx512)) {
    CHECK_THROWS(std::invalid_argument, "AVX512", Crc32c(nullptr, 0, 0, ChecksumKernel::kAvx512));
  }
  if (lacks(ChecksumKernel::kSse42)) {
    CHECK_THROWS(std::invalid_argument, "SSE42", Crc32c(nullptr, 0, 0, ChecksumKernel::kSse42));
  }
}

}  // namespace
}  // namespace lohan

int main() { return lohan::test::RunAll(); }
